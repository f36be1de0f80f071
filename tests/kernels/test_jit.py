"""The kernels in numba against the reference with rounded inputs."""

import pytest
from expert_pools import a_pool, errors, form
from test_native import SHAPES, products

from apex_engine.kernels import registry
from apex_engine.kernels.layout import ExpertShape

pytest.importorskip("numba", reason="needs the extra `jit`")
GROUPED = [name for name, (_, _, up, down, _) in SHAPES.items() if form(up).grouped and form(down).grouped]


@pytest.mark.parametrize("name", GROUPED)
def test_a_matrix_equals_the_reference(name):
    layout, memory, cases = products(name)
    kernel = registry.pick("numba", layout, memory)
    for matrix, (x, expected) in cases.items():
        for tokens in (1, 3):
            worst, rms = errors(kernel.linear(x[:tokens], 1, matrix), expected[:tokens])
            assert worst <= 1e-5 and rms <= 1e-5, (matrix, tokens, worst, rms)


def test_what_is_not_numbas():
    layout, memory = a_pool(ExpertShape(64, 96, True), form("int8"), form("int2", 32))
    from apex_engine.kernels.cpu.jit import JitKernel

    with pytest.raises(ValueError, match="only grouped codes"):
        JitKernel(layout, memory)
