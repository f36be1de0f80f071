"""One bfloat16 token gives torch's own bits, where the machine's torch sums as `native` knows how to."""

import numpy as np
import pytest
import torch
from expert_pools import SWIGLU, a_pool, form, one_expert

from apex_engine.kernels.base import Routed
from apex_engine.kernels.cpu import native
from apex_engine.kernels.layout import ExpertShape, Layout
from apex_engine.kernels.reference import Reference
from apex_engine.kernels.registry import pick


def beside_torch(kernel, reference, x, slots, routed, gates):
    """What the kernel puts in an output of NaN, and what torch does."""
    found, expected = torch.full((2, len(gates), x.shape[1]), float("nan"))
    kernel(x, slots, routed, gates, SWIGLU, found)
    reference(x, slots, routed, gates, SWIGLU, expected)
    return found, expected


@pytest.fixture
def make():
    def kernel(hidden: int, intermediate: int) -> tuple[Layout, torch.Tensor, native.NativeKernel]:
        layout, memory = a_pool(ExpertShape(hidden, intermediate, True), form("bfloat16"), form("bfloat16"), slots=2)
        torch.set_num_threads(2)  # more would divide a long row of few outputs
        blobs = memory.clone()
        if not native.sums_like_torch(layout, memory):
            pytest.skip("torch sums otherwise on this machine, or it has no avx512-bf16: torch computes there")
        assert (memory[0] == 0xFF).all() and torch.equal(memory[1:], blobs[1:])
        return layout, blobs, native.NativeKernel(layout, blobs, like_torch=True)

    threads = torch.get_num_threads()
    yield kernel
    torch.set_num_threads(threads)


@pytest.mark.parametrize("hidden, intermediate", [(192, 384), (160, 96), (768, 2048), (2048, 1408), (4096, 64)])
def test_experts(make, hidden, intermediate):
    layout, memory, kernel = make(hidden, intermediate)
    reference = Reference(layout, memory)
    assert kernel.name == "native avx512-bf16"
    gates = torch.rand(4)
    one, each = one_expert(1), Routed(np.array([0, 1, 2]), np.zeros(2, np.int64), np.arange(2))
    three = Routed(np.array([0, 1, 4]), np.array([0, 0, 1, 2]), np.arange(4))
    for scale in (0.01, 1, 100):
        x = (torch.randn(3, hidden) * scale).bfloat16()
        found, expected = beside_torch(kernel, reference, x[:1], [1, 0], each, gates[:2])
        assert torch.equal(found, expected) and expected.any()
        # one expert has three tokens: torch's
        found, expected = beside_torch(kernel, reference, x, [1, 0], three, gates)
        assert torch.equal(found, expected)
        # another dtype: torch's
        found, expected = beside_torch(kernel, reference, x[:1].float(), [1], one, gates[:1])
        assert torch.equal(found, expected)


@pytest.mark.filterwarnings("ignore:TF32")  # `flags` sets it too
def test_with_other_settings_than_tried_it_is_torchs(make, monkeypatch):
    _, _, kernel = make(192, 384)
    assert kernel.most_tokens(torch.bfloat16) == 1
    monkeypatch.setattr(torch, "get_num_threads", lambda: 61)
    assert kernel.most_tokens(torch.bfloat16) == 0
    monkeypatch.undo()
    with torch.backends.mkldnn.flags(enabled=False):
        assert kernel.most_tokens(torch.bfloat16) == 0
    assert kernel.most_tokens(torch.bfloat16) == 1


@pytest.mark.parametrize("up", [1, -0.71, 1e30])
def test_silu_of_every_normal_number(make, up):
    layout, memory, kernel = make(240, 240)  # not a whole number of torch's vectors
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x, views, routed = torch.zeros(1, 240, dtype=torch.bfloat16), layout.views(memory[0]), one_expert(1)
    x[0, 0], reference = 1, Reference(layout, memory)
    views["up.weight"].zero_()
    views["up.weight"][240:, 0] = up
    views["down.weight"].copy_(torch.eye(240))
    for gates in numbers[numbers.isfinite()].split(240):
        views["up.weight"][: len(gates), 0] = gates
        found, expected = beside_torch(kernel, reference, x, [0], routed, torch.ones(1))
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_subnormal_sums_are_zero(make):
    layout, memory, kernel = make(2048, 1408)
    for scale in (1e-38, 1e-37, 1e-36):
        x = (torch.randn(1, 2048) * scale).bfloat16()
        weight = layout.views(memory[0])["up.weight"]
        assert torch.equal(kernel.linear(x.float(), 0, "up").bfloat16(), torch.nn.functional.linear(x, weight))


def test_the_defaults_of_torch_do_not_matter(make):
    make(192, 384)
    layout = Layout(ExpertShape(192, 384, True), form("bfloat16"), form("bfloat16"))
    memory = torch.zeros(1, layout.stride, dtype=torch.uint8)
    try:
        for dtype in (torch.bfloat16, torch.float64):
            torch.set_default_dtype(dtype)
            assert native.sums_like_torch(layout, memory)
        torch.set_default_device("meta")
        assert native.sums_like_torch(layout, memory)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def test_the_trial_tells_another_order(make, monkeypatch):
    make(192, 384)
    layout = Layout(ExpertShape(192, 384, True), form("bfloat16"), form("bfloat16"))
    for other in (
        lambda x, w: (x.float() @ w.float().T).bfloat16(),
        lambda x, w: torch.nn.functional.linear(x.flip(-1), w.flip(-1)),
        lambda x, w: torch.cat([torch.nn.functional.linear(x, w)[:, :-1], x[:, :1]], 1),
    ):
        monkeypatch.setattr(native, "linear", other)
        assert not native.sums_like_torch(layout, torch.zeros(1, layout.stride, dtype=torch.uint8))


@pytest.mark.parametrize(
    "parts",
    [
        (72, 40, "bfloat16", ""),
        (32, 16, "bfloat16", ""),
        (192, 384, "float16", ""),
        (192, 384, "bfloat16", "bfloat16"),
    ],
)
def test_what_it_does_not_know(parts):
    hidden, intermediate, name, bias = parts
    layout = Layout(ExpertShape(hidden, intermediate, True, bias), form(name), form(name))
    memory = torch.zeros(1, layout.stride, dtype=torch.uint8)
    assert not native.sums_like_torch(layout, memory)
    assert pick("auto", layout, memory, bit_equal=True).name == "torch"
