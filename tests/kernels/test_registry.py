"""Which kernel is picked, and what picking one imports."""

import ast
from pathlib import Path

import pytest
import torch

from apex_engine.errors import ApexError
from apex_engine.kernels import registry
from apex_engine.kernels.cpu import native
from apex_engine.kernels.layout import ExpertShape, Layout, MatrixFormat

KERNELS = Path(registry.__file__).parent
LOW = (MatrixFormat("int2", 32), MatrixFormat("int2", 32))
HIGH = (MatrixFormat("bfloat16"), MatrixFormat("bfloat16"))
MIXED = (MatrixFormat("int2", 32), MatrixFormat("int8"))


def name(kernels, forms):
    layout = Layout(ExpertShape(64, 64, True), *forms)
    return registry.pick(kernels, layout, torch.zeros(1, layout.stride, dtype=torch.uint8)).name


@pytest.mark.parametrize("forms", [LOW, MIXED, HIGH])
def test_the_fastest_is_picked_and_named(forms):
    assert name("auto", forms) == f"native {native.instruction_set()}"


@pytest.mark.parametrize("forms", [LOW, MIXED, HIGH])
def test_torch_can_be_forced(forms):
    assert name("torch", forms) == "torch"


def test_numba_can_be_forced_where_all_codes_are_grouped():
    pytest.importorskip("numba", reason="needs the extra `jit`")
    assert name("numba", LOW) == "numba"
    assert name("numba", MIXED) == name("numba", HIGH) == "torch"


def test_without_a_compiler_the_next_best_is_taken(monkeypatch):
    monkeypatch.setattr(native, "library", lambda: None)
    with pytest.raises(ApexError, match="C compiler"):
        name("native", LOW)
    with monkeypatch.context() as without:
        without.setattr(registry, "find_spec", lambda name: None)
        assert name("auto", LOW) == "torch"
    pytest.importorskip("numba", reason="needs the extra `jit`")
    assert name("auto", LOW) == "numba"


def test_numba_that_is_missing_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    with pytest.raises(ApexError) as refused:
        name("numba", LOW)
    assert "pip install 'apex-engine[jit]'" in str(refused.value) and "\n" not in str(refused.value)


def test_triton_needs_a_gpu():
    with pytest.raises(ApexError, match="CUDA device"):
        name("triton", LOW)


# What may be imported beside numpy and torch where a module is imported, by folder or file.
HEAVY = {"transformers", "rich", "hqq", "bitsandbytes", "numba", "triton"}
ON_GPU = ("codes", "gemv", "gemm", "launch", "kernel", "compiler")
ALLOWED = {"cpu/jit.py": {"numba"}, **{f"triton/{name}.py": {"triton"} for name in ON_GPU}}
LIGHT = ("registry.py", "triton/cases.py", "triton/compile_matrix.py")  # for --help: not even numpy and torch


def imported_at_once(path: Path) -> set[str]:
    """Modules that importing a file imports: not within functions, type checking or `if __name__`."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("file", sorted(str(path.relative_to(KERNELS)) for path in KERNELS.rglob("*.py")))
def test_a_kernel_imports_what_it_computes_with(file):
    names = imported_at_once(KERNELS / file)
    packages = {name.split(".")[0] for name in names}
    assert packages & HEAVY <= ALLOWED.get(file, set())
    ours = {name for name in names if name.startswith("apex_engine.")}
    assert {name for name in ours if not name.startswith("apex_engine.kernels.")} <= {"apex_engine.errors"}
    light = {f"apex_engine.kernels.{name.removesuffix('.py').replace('/', '.')}" for name in LIGHT}
    if file in LIGHT:
        assert not packages & {"numpy", "torch"} and ours <= {"apex_engine.errors", *light}
    for heavy, ways in ALLOWED.items():  # nor by way of another module of the kernels, but in the same folder
        module = f"apex_engine.kernels.{heavy.removesuffix('.py').replace('/', '.')}"
        assert module not in ours or ways <= ALLOWED.get(file, set())


def test_codes_that_the_c_kernel_does_not_read_are_kept_from_it(monkeypatch):
    monkeypatch.setattr(native, "WIDTHS", (3, 4))
    assert not name("auto", LOW).startswith("native") and name("auto", HIGH).startswith("native")
    with pytest.raises(ApexError, match="kernels native read no codes of int2"):
        name("native", LOW)
