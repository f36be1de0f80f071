"""Starting is cheap, and importing the package is enough for transformers to know apex checkpoints."""

import os
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from apex_engine.__main__ import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
MAPPED = ("kernels", "quantize", "eval")
TRIES = 3  # of which the least counts: other programs make a process slower, none makes it faster


def cpu_seconds(*arguments):
    """User and system time of a Python process that ends well: of several, the least."""
    found = []
    for _ in range(TRIES):
        process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        found.append(usage.ru_utime + usage.ru_stime)
    return min(found)


def child(code, *arguments):
    """stdout of Python code in a process of its own, with this checkout's package."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


THERE = [name for name, command in COMMANDS.items() if find_spec(command.module)]


@pytest.mark.parametrize("name", ["", *THERE])
def test_help_takes_less_than_a_second(name):
    assert cpu_seconds("-m", "apex_engine", *name.split(), "--help") < 1


def test_the_package_is_there_at_once():
    assert cpu_seconds("-c", "import apex_engine") < 0.5
    loaded = child("import apex_engine, sys; print(*sys.modules)").split()
    assert not {"torch", "transformers", "numpy", "rich"} & set(loaded)


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("apex_engine.config", {"torch", "transformers"}),
        ("apex_engine.cli.options", {"torch", "transformers"}),
        ("apex_engine.kernels.packing", {"transformers", "rich", "hqq", "bitsandbytes"}),
        ("apex_engine.checkpoint.manifest", {"transformers", "rich", "hqq", "bitsandbytes"}),
    ],
)
def test_modules_load_no_more_than_they_need(module, absent):
    assert not absent & set(child(f"import {module}, sys; print(*sys.modules)").split())


def test_the_names_of_the_package():
    shown = child(
        "import apex_engine as a; assert {'load', 'Config', 'Engine', 'ApexError'} <= set(dir(a))\n"
        "from apex_engine import ApexError, Config, errors\n"
        "assert ApexError is errors.ApexError and a.Config is Config\n"
        "try: a.lod\nexcept AttributeError as error: print(error)"
    )
    assert shown == "module 'apex_engine' has no attribute 'lod'"


LOADED = """
def loads():
    from transformers import AutoModelForCausalLM
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as configs, AUTO_QUANTIZER_MAPPING as quantizers
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
    assert type(model.apex) is sys.modules["apex_engine"].Engine
    assert not [finder for finder in sys.meta_path if "apex" in type(finder).__module__], "the finder has not gone"
    return configs, quantizers
"""
AFTER = """
import sys, threading, apex_engine, transformers

assert "apex_engine.runtime.hook" not in sys.modules
sys.modules["transformers.quantizers"] = None  # the first import of modeling_utils fails
try:
    import transformers.modeling_utils
except ImportError:
    del sys.modules["transformers.quantizers"]
else:
    raise SystemExit("it should have failed")

found = []
def look():
    import transformers.modeling_utils as module
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
    found.append("apex" in AUTO_QUANTIZER_MAPPING and module.__spec__.loader is module.__loader__)

threads = [threading.Thread(target=look) for _ in range(2)]  # then two threads want it at once
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert found == [True, True], found
for known in loads():
    del known["apex"]
"""
BEFORE = """
for name in [name for name in sys.modules if name.partition(".")[0] == "apex_engine"]:
    del sys.modules[name]
import apex_engine

assert "apex_engine.runtime.hook" in sys.modules
loads()
"""


def test_transformers_learns_of_apex_whichever_comes_first(bundled_apex):
    """In one process, for the sake of time: transformers after the package, then the package anew after transformers."""
    child(LOADED + AFTER + BEFORE, bundled_apex)


def test_commands_run_as_modules_from_anywhere(tmp_path):
    """Namespace folders, the mapping of the package and `python -m`, from a folder that is not the checkout."""
    for module in ("apex_engine.quantize", "apex_engine.generate"):
        shown = subprocess.run(
            [sys.executable, "-m", module, "--help"], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert "default" in shown.stdout


def test_from_a_checkout_without_installing():
    """`apex_engine` finds its sister folders beside it."""
    code = (
        "import site, sys; site.main(); sys.path.insert(0, sys.argv[1]); from importlib.util import find_spec; "
        "print(find_spec('apex_engine.kernels.layout').origin)"
    )
    shown = subprocess.run(
        [sys.executable, "-S", "-c", code, str(ROOT)], capture_output=True, text=True, check=True
    ).stdout
    assert Path(shown.strip()) == ROOT / "kernels" / "layout.py"


def test_every_folder_of_modules_is_installed():
    """setuptools is told each package by name; what is not in its list is missing from an installation."""
    found = set()
    for folder, package in ((ROOT / "apex_engine", "apex_engine"), *((ROOT / f, f"apex_engine.{f}") for f in MAPPED)):
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).parts[:-1]
            if "tasks" not in parts:  # of lm-eval, installed as data
                found.add(".".join((package, *parts)))
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert sorted(setuptools["packages"]) == sorted(found)
