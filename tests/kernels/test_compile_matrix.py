import json
import os
import subprocess
import sys

import pytest

from apex_engine.errors import ApexError
from apex_engine.kernels.layout import MATRICES
from apex_engine.kernels.triton import cases as matrix
from apex_engine.kernels.triton import compile_matrix


def test_kernels_compile_without_spills():
    """In a process of its own, as this one may interpret."""
    pytest.importorskip("triton", reason="needs triton, which has no build for this platform")
    cases = [
        (target, "int2", "down", tokens, "float32" if tokens == 1 else "bfloat16")
        for target in (80, 90)
        for tokens in (1, 64)
    ]
    program = (
        "import json; from apex_engine.kernels.triton.cases import Case\n"
        "from apex_engine.kernels.triton.compiler import compile_case\n"
        f"print(json.dumps([compile_case(Case(*case)).fault(case[0]) for case in {cases}]))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["", "", "", ""]


def test_every_format_and_target_is_in_the_matrix():
    cases = list(matrix.cases(list(matrix.SHARED), list(matrix.FORMATS)))
    assert len(set(cases)) == len(cases)
    kernels = {(target, 1) for target in matrix.SHARED} | {(t, m) for t in (80, 86, 89, 90, 100) for m in (16, 64)}
    for name in MATRICES:
        for form in matrix.FORMATS:
            assert {(c.target, c.tokens) for c in cases if (c.matrix, c.format) == (name, form)} == kernels


def test_what_fails_the_matrix():
    assert matrix.Usage(255, 0, 99 * 1024, 1.0).fault(89) == ""
    assert matrix.Usage(255, 0, 99 * 1024 + 4, 1.0).fault(86) == "needs 101380 bytes of shared memory of 101376"
    assert matrix.Usage(255, 8, 0, 1.0).fault(80) == "spills 8 bytes"


def test_what_is_at_fault_is_named(capsys):
    case = matrix.Case(80, "int2", "up", 1, "float32")
    assert compile_matrix.report({case: matrix.Usage(255, 8, 0, 1.0)}) == 1
    assert "sm_80 gemv int2 up of float32 x: spills 8 bytes" in capsys.readouterr().err
    assert compile_matrix.report({case: matrix.Usage(255, 0, 0, 1.0)}) == 0


def test_the_matrix_refuses_to_compile_interpreted_kernels(monkeypatch):
    pytest.importorskip("triton", reason="needs triton, which has no build for this platform")
    monkeypatch.setattr("apex_engine.kernels.triton.launch.INTERPRETED", True)
    with pytest.raises(ApexError, match="unset it"):
        compile_matrix.main(compile_matrix.parse(["--target", "80"]))
