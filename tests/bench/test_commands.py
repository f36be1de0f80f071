"""Every command that the docs name, at its smallest: it comes to its end, and prints a row of what the docs show of it."""

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import memory
from models import save_model

ROOT = Path(__file__).resolve().parents[2]
DOCS = [ROOT / "README.md", ROOT / "Makefile", *sorted((ROOT / "docs").glob("*.md"))]
SHORT = "--windows 1 --prompt 4 --tokens 3 --memory 50% --calibration-tokens 32"
# The command, in which MODEL is the folder of a small model and OUT a file; a part of what it prints or writes.
COMMANDS = {
    f"decode --model MODEL {SHORT}": "| default, gptq twins calibrated for KL .02 |",
    f"decode --model MODEL {SHORT} --sweep 1": "| 1 | exact |",
    f"decode --model MODEL {SHORT} --prompts 4 12": "| evict | exact | 12 |",
    "decode --synthetic demo --repeats 1 --prompt 4 --tokens 3 --device cpu --host-memory 100%": "| apex |",
    "demo_model --model MODEL --windows 2 --length 16 --repeats 1 --tokens 4 --calibration-tokens 32 -o OUT": "| all LOW,",
    "demo_tasks --check": "",
    "gpu_check --device cpu --model MODEL --small --shapes demo --synthetic demo -o OUT": '"passed": true',
    "kernels --shapes demo --tokens 1 --kernels torch native --turns 1 --slots 8": "| int2 | torch | 1 |",
    "memory --small --budgets 50%": "| 50% |",
    'quantize --shapes "bundled model\'s up" --repeats 1': "| bundled model's up | gptq, importance |",
}
OPTION = re.compile(r"(?<![\w-])--?[a-z][\w-]*")


@pytest.fixture(scope="module")
def small(bundled, tmp_path_factory):
    """A random model of two layers with the bundled one's tokenizer and texts."""
    folder = tmp_path_factory.mktemp("small") / "model"
    save_model(folder, vocab_size=json.loads((bundled / "config.json").read_text())["vocab_size"])
    for path in bundled.glob("tokenizer*"):
        shutil.copy(path, folder)
    shutil.copytree(bundled / "text", folder / "text")
    return folder


@pytest.mark.parametrize("command", COMMANDS, ids=[shlex.split(command)[0] for command in COMMANDS])
def test_a_command_of_the_docs_runs(command, small, tmp_path, capsys, monkeypatch):
    # What takes a process of its own for the figures, this one can do for a test.
    monkeypatch.setattr(memory, "measured", memory.peak)
    out = tmp_path / "out"
    name, *arguments = [{"MODEL": str(small), "OUT": str(out)}.get(word, word) for word in shlex.split(command)]
    importlib.import_module(f"benchmarks.{name}").main(arguments)
    text = out.read_text() if "OUT" in command else capsys.readouterr().out
    assert COMMANDS[command] in text
    if name == "gpu_check":
        decoding = json.loads(text)["decode"]
        assert decoding["host_memory"] == "100%" and len(decoding["runs"]) == 5


def test_the_kernels_of_a_gpu_compile_without_one():
    """In a process of its own, as this one may interpret them."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = "-m apex_engine.kernels.triton.compile_matrix --target 75 --format int8 --json"
    done = subprocess.run([sys.executable, *command.split()], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {case["target"] for case in json.loads(done.stdout)} == {75}


def test_every_command_of_the_docs_is_tried():
    text = " ".join(" ".join(path.read_text() for path in DOCS).split())
    tried = {shlex.split(command)[0] for command in COMMANDS}
    assert set(re.findall(r"-m benchmarks\.(\w+)", text)) <= tried
    assert {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "ArgumentParser" in path.read_text()} == tried
    for name in set(re.findall(r"-m (apex_engine[\w.]*\w)", text)):
        assert importlib.util.find_spec(name), f"the docs name {name}, which there is not"


def test_every_option_of_a_benchmark_in_the_docs_is_tried():
    """Those of code in the docs that some benchmark has; --synthetic demo stands for the other shapes."""
    sources = [path.read_text() for path in (ROOT / "benchmarks").glob("*.py")]
    known = {name for text in sources for name in re.findall(r'add_argument\(\s*"(--?[a-z][\w-]*)"', text)}
    named = {
        name for path in DOCS for code in re.findall(r"`[^`]*`", path.read_text()) for name in OPTION.findall(code)
    }
    named |= set(OPTION.findall(" ".join(re.findall(r"-m benchmarks\.\w+ (.*)", (ROOT / "Makefile").read_text()))))
    assert {"--sweep", "--prompts", "--synthetic", "--windows", "-o"} <= known & named
    assert known & named <= {name for command in COMMANDS for name in OPTION.findall(command)}
