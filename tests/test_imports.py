"""Imports point one way, by folder: a module may import only from its own folder and from those of a lower rank."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RANKS = [  # from the bottom up; folders of one line do not know each other
    ["apex_engine.errors"],
    ["apex_engine.kernels", "apex_engine.core"],
    ["apex_engine.config"],
    ["apex_engine.checkpoint", "apex_engine.families"],
    ["apex_engine.quantize", "apex_engine.predict", "apex_engine.memory"],
    ["apex_engine.runtime"],
    ["apex_engine.cli"],
    ["apex_engine.eval"],
    ["apex_engine.calibration"],
    ["apex_engine.generate", "apex_engine.calibrate", "apex_engine.perplexity", "apex_engine.__init__"],
    ["apex_engine.__main__"],
]
# Commands that live in the folder of what they do: they may use everything.
COMMANDS = ["apex_engine.quantize.__main__", "apex_engine.eval.__main__", "apex_engine.kernels.triton.compile_matrix"]


def modules() -> dict[str, Path]:
    found = {}
    for folder, package in ((ROOT / "apex_engine", "apex_engine"), *((ROOT / f, f"apex_engine.{f}") for f in MAPPED)):
        for path in folder.rglob("*.py"):
            if "tasks" not in path.parts:
                found[".".join([package, *path.relative_to(folder).with_suffix("").parts])] = path
    return found


MAPPED = ("kernels", "quantize", "eval")
MODULES = modules()


def imported(path: Path) -> set[str]:
    """Modules that a file imports, wherever in it; of `from a import b` both a and a.b."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def room(module: str) -> str | None:
    """The entry of RANKS that a module belongs to."""
    return next((r for rank in RANKS for r in rank if module == r or module.startswith(r + ".")), None)


def rank(room: str) -> int:
    return next(i for i, rooms in enumerate(RANKS) if room in rooms)


def test_every_module_has_a_room():
    assert [m for m in MODULES if not room(m) and m not in COMMANDS and MODULES[m].name != "__init__.py"] == []


@pytest.mark.parametrize("module", sorted(set(MODULES) - set(COMMANDS)))
def test_imports_point_down(module):
    mine = room(module)
    if mine is None:
        return  # the empty __init__.py of the package's folders
    for other in {room(name) for name in imported(MODULES[module]) if name in MODULES} - {mine, None}:
        assert rank(other) < rank(mine), f"{module} imports {other}, which ranks no lower"
    commands = imported(MODULES[module]) & set(COMMANDS)
    assert not commands, f"{module} imports the commands {commands}"


@pytest.mark.parametrize("module", sorted(m for m in MODULES if m.startswith("apex_engine.kernels")))
def test_kernels_know_no_model(module):
    assert not {name for name in imported(MODULES[module]) if name.startswith("transformers")}


@pytest.mark.parametrize("module", sorted(m for m in MODULES if m.startswith("apex_engine.core")))
def test_decisions_are_arithmetic(module):
    """numpy and the standard library; no torch, threads, files or clock."""
    names = {name.split(".")[0] for name in imported(MODULES[module])}
    assert not names & {"torch", "threading", "time", "transformers", "pathlib", "os", "safetensors"}


SILENT = ("core", "checkpoint", "predict", "memory", "runtime", "kernels")  # the rooms that print and draw nothing


@pytest.mark.parametrize("module", sorted(m for m in set(MODULES) - set(COMMANDS) if m.split(".")[1] in SILENT))
def test_the_runtime_prints_and_draws_nothing(module):
    names = imported(MODULES[module])
    assert not {name for name in names if name.split(".")[0] in ("rich", "tqdm") or name.startswith("apex_engine.cli")}
    calls = (node.func for node in ast.walk(ast.parse(MODULES[module].read_text())) if isinstance(node, ast.Call))
    assert not [call for call in calls if isinstance(call, ast.Name) and call.id == "print"]


def test_top_level_packages_are_not_shadowed():
    """`import kernels` from a checkout is Hugging Face's package or nothing of ours."""
    assert not any((ROOT / folder / "__init__.py").exists() for folder in MAPPED)


def test_tests_and_benchmarks_use_the_seams_and_no_private_names():
    """An underscore of another object is a decision that cannot be seen from outside: a seam is missing there."""
    reached = []
    for path in [*(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.startswith("__"):
                continue
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "os", "sys")
            if not own and node.attr not in PUBLIC_IN_SPITE_OF_IT:
                reached.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert not reached, "\n".join(reached)


# Names of other projects, or of the standard library's named tuples, that are meant to be used.
PUBLIC_IN_SPITE_OF_IT = {"_replace", "_fields", "_asdict", "_apply_gate"}
