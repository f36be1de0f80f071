"""Heavy libraries are imported where they are used, and missing ones are named."""

import ast
import sys
from pathlib import Path

import pytest
import torch
from conftest import quantize

from apex_engine.errors import ApexError
from apex_engine.kernels.layout import MatrixFormat
from apex_engine.quantize.methods.encode import encode

ROOT = Path(__file__).resolve().parents[2]
# Files with a parser, and what they may import of this project when they start, which imports as little.
PARSERS = ("quantize/__main__.py", "apex_engine/cli/info.py", "apex_engine/cli/verifying.py")
LIGHT = {
    "apex_engine.errors": "apex_engine/errors.py",
    "apex_engine.quantize.forms": "quantize/forms.py",
    "apex_engine.quantize.options": "quantize/options.py",
    "apex_engine.quantize.methods.table": "quantize/methods/table.py",
    "apex_engine.quantize.source.names": "quantize/source/names.py",
}


def imported_at_start(file: str) -> set[str]:
    """What importing a module imports: not what its functions do, nor what only type checkers read."""
    nodes = ast.parse((ROOT / file).read_text()).body
    names = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    return names | {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}


@pytest.mark.parametrize("file", [*PARSERS, *LIGHT.values()])
def test_parsers_import_nothing_heavy(file):
    for name in imported_at_start(file):
        mine = name.startswith("apex_engine")
        allowed = {*LIGHT, "apex_engine.cli.console"} if mine else sys.stdlib_module_names
        assert (name if mine else name.partition(".")[0]) in allowed, f"{file} imports {name}"


@pytest.mark.parametrize(
    ("package", "options", "what"), [("hqq", {"low_method": "hqq"}, "hqq"), ("bitsandbytes", {"high": "int8"}, "int8")]
)
def test_a_missing_library_is_named_with_its_extra(tiny, tmp_path, monkeypatch, package, options, what):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ApexError, match=rf"{what}.* needs {package}: pip install 'apex-engine\[quantize\]'") as caught:
        quantize(tiny()[0], tmp_path / "apex", **options)
    assert "\n" not in str(caught.value) and not (tmp_path / "apex").exists()
    assert set(encode(torch.randn(4, 64), MatrixFormat("int2", 64))) == {"codes0", "scale", "zero"}  # needs neither
