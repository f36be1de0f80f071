"""The contract of `Kernel`, and what the kernels of a CPU have in common."""

import numpy as np
import pytest
import torch
from expert_pools import CLAMPED, DEVICE, NO_GATE, NORMED, SWIGLU, a_pool, errors, form, one_expert

from apex_engine.kernels.base import Kernel, Routed
from apex_engine.kernels.layout import ExpertShape, Layout
from apex_engine.kernels.reference import Reference
from apex_engine.kernels.registry import pick

ON_CPU = ("native", "numba")  # they round the inputs of grouped codes
EVERY = (*ON_CPU, "torch", "triton")


def kernel_of(name: str, layout: Layout, memory: torch.Tensor) -> tuple[Kernel, str]:
    """The kernel and its device; "triton" interpreted where there is no GPU, which `pick` would refuse."""
    if name in ("numba", "triton"):
        pytest.importorskip(name)
    if name != "triton":
        return pick(name, layout, memory), "cpu"
    from apex_engine.kernels.triton.kernel import TritonKernel

    return TritonKernel(layout, memory.to(DEVICE)), DEVICE


def check(name, layout, memory, activation, dtype, limit):
    """Five tokens, two choices each, over two of three experts; the rest of the output and the poisoned slot stay out of it."""
    hidden = layout.shape.hidden
    x, gates = torch.randn(5, hidden).to(dtype), torch.rand(10)
    tokens, choices = np.array([0, 2, 4, 1, 2]), np.array([0, 1, 0, 1, 0])
    routed = Routed(np.array([0, 3, 5]), tokens, tokens * 2 + choices)
    found, expected = torch.full((2, 10, hidden), float("nan"))
    Reference(layout, memory, round_inputs=name in ON_CPU)(x.float(), [2, 0], routed, gates, activation, expected)
    kernel, device = kernel_of(name, layout, memory)
    found = found.to(device)
    kernel(x.to(device), [2, 0], routed, gates.to(device), activation, found)
    found = found.cpu()
    assert torch.equal(found.isnan(), expected.isnan()) and found.isnan().any(1).sum() == 5
    worst, rms = errors(found[routed.rows], expected[routed.rows])
    assert worst <= limit and rms <= limit, (kernel.name, worst, rms)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("activation", "gated", "bias"),
    [(SWIGLU, True, ""), (CLAMPED, True, ""), (NO_GATE, False, ""), (SWIGLU, True, "bfloat16"), (NORMED, True, "")],
    ids=["swiglu", "another gate", "no gate", "bias", "norm"],
)
@pytest.mark.parametrize(
    ("name", "up", "down"),
    [
        ("native", "int2", "int2"),
        ("native", "int3", "int4"),
        ("native", "int8", "int8"),
        ("numba", "int2", "int2"),
        ("numba", "int3", "int4"),
    ],
)
def test_routed_experts(name, up, down, activation, gated, bias, dtype):
    layout, memory = a_pool(ExpertShape(96, 64, gated, bias), form(up, 32), form(down, 32))
    # a hidden value that lies between two int8 codes may be rounded either way: one step of 127 in one of 32
    check(name, layout, memory, activation, dtype, 2e-3)


@pytest.mark.parametrize("name", EVERY)
def test_three_bits_above_four(name):
    layout, memory = a_pool(ExpertShape(128, 64, True), form("int3"), form("int4"))
    check(name, layout, memory, SWIGLU, torch.float32, 2e-3 if name in ON_CPU else 1e-5)


@pytest.mark.parametrize("name", EVERY)
def test_nothing_to_do(name):
    layout, memory = a_pool(ExpertShape(64, 64, True), form("int2", 32), form("int2", 32))
    kernel, device = kernel_of(name, layout, memory)
    empty, out = np.zeros(0, np.int64), torch.full((2, 64), float("nan"), device=device)
    x, gates = torch.zeros(1, 64, device=device), torch.ones(2, device=device)
    kernel(x, [], Routed(np.array([0]), empty, empty), gates, SWIGLU, out)
    kernel(x, [1], Routed(np.array([0, 0]), empty, empty), gates, SWIGLU, out)
    assert out.isnan().all()


@pytest.mark.parametrize("name", ON_CPU)
def test_a_tokens_result_does_not_depend_on_the_others(name):
    layout, memory = a_pool(ExpertShape(192, 384, True), form("int2"), form("int3"))
    kernel, _ = kernel_of(name, layout, memory)
    x, together, alone, routed = torch.randn(70, 192), torch.empty(70, 192), torch.empty(70, 192), one_expert(70)
    kernel(x, [1], routed, torch.ones(70), SWIGLU, together)
    for t in range(70):
        only = Routed(np.array([0, 1]), routed.tokens[t : t + 1], routed.rows[t : t + 1])
        kernel(x, [1], only, torch.ones(70), SWIGLU, alone)
    assert torch.equal(together, alone)
