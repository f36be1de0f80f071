"""Imports point one way: a module may import only modules of a lower rank, listed here from the bottom up."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ORDER = [
    "apex_engine.vocabulary",
    "apex_engine.command",
    "apex_engine.kernels.packing",
    "apex_engine.kernels.layout",
    "apex_engine.kernels.reference",
    "apex_engine.kernels.gpu",
    "apex_engine.kernels.compile_matrix",
    "apex_engine.kernels.native",
    "apex_engine.kernels.jit",
    "apex_engine.kernels.pick",
    "apex_engine.quantize.checkpoint",
    "apex_engine.quantize.moments",
    "apex_engine.quantize.gptq",
    "apex_engine.quantize.methods",
    "apex_engine.quantize.source",
    "apex_engine.quantize.convert",
    "apex_engine.quantize.__main__",
    "apex_engine.scorer",
    "apex_engine.dispatch",
    "apex_engine.policies",
    "apex_engine.link",
    "apex_engine.config",
    "apex_engine.thresholds",
    "apex_engine.plan",
    "apex_engine.ledger",
    "apex_engine.store",
    "apex_engine.cache",
    "apex_engine.host",
    "apex_engine.loader",
    "apex_engine.predictor",
    "apex_engine.engine",
    "apex_engine.recorder",
    "apex_engine.experts",
    "apex_engine.hook",
    "apex_engine.__init__",
    "apex_engine.arguments",
    "apex_engine.generate",
    "apex_engine.eval.machine",
    "apex_engine.eval.texts",
    "apex_engine.eval.perplexity",
    "apex_engine.eval.pair",
    "apex_engine.perplexity",
    "apex_engine.search",
    "apex_engine.calibrate",
    "apex_engine.eval.together",
    "apex_engine.eval.lm",
    "apex_engine.eval.delta",
    "apex_engine.eval.report",
    "apex_engine.eval.__main__",
]


def modules() -> dict[str, Path]:
    found = {f"apex_engine.{path.stem}": path for path in (ROOT / "apex_engine").glob("*.py")}
    for folder in ("kernels", "quantize", "eval"):
        found |= {f"apex_engine.{folder}.{path.stem}": path for path in (ROOT / folder).glob("*.py")}
    return found


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def test_every_module_has_a_rank():
    assert sorted(modules()) == sorted(ORDER)


@pytest.mark.parametrize("module", ORDER)
def test_imports_point_down(module):
    below = set(ORDER[: ORDER.index(module)])
    ours = imported(modules()[module]) & (set(ORDER) | {"apex_engine"})
    assert ours <= below, f"{module} imports {sorted(ours - below)}, which rank above it"


@pytest.mark.parametrize("module", [m for m in ORDER if m.startswith("apex_engine.kernels")])
def test_kernels_know_no_model(module):
    assert not {name for name in imported(modules()[module]) if name.startswith("transformers")}


@pytest.mark.parametrize("module", ["scorer", "dispatch", "policies"])
def test_policies_are_arithmetic(module):
    names = imported(modules()[f"apex_engine.{module}"])
    assert not {name for name in names if name.split(".")[0] in ("torch", "threading", "time", "transformers")}


def test_top_level_packages_are_not_shadowed():
    """`import kernels` from a checkout is Hugging Face's package or nothing of ours."""
    assert not any((ROOT / folder / "__init__.py").exists() for folder in ("kernels", "quantize", "eval"))
