"""The kernels in C against the reference with rounded inputs, on every instruction set this machine has."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
import torch
from expert_pools import SWIGLU, a_pool, errors, form, one_expert

from apex_engine.kernels.cpu import native
from apex_engine.kernels.layout import MATRICES, ExpertShape
from apex_engine.kernels.reference import Reference, matrix_linear

ISAS = [isa for isa in ("avx512-vnni", "avx2", "neon", "generic") if native.instruction_set(isa)]
TOKENS = (1, 2, 3, 4, 5, 16, 17, 40)

# (hidden, intermediate, up, down, group): each names the edge it hits
SHAPES = {
    "one whole block": (256, 256, "int2", "int2", 64),
    "demo": (192, 384, "int2", "int2", 64),
    "half a block at the end": (96, 160, "int2", "int2", 32),
    "groups of a quarter lane": (64, 96, "int2", "int2", 8),
    "sixteen groups a block": (640, 64, "int2", "int2", 16),
    "a group longer than a register": (256, 768, "int4", "int4", 256),
    "three bits": (192, 192, "int3", "int3", 64),
    "three bits in groups too short for the high plane": (160, 96, "int2", "int3", 16),
    "three bits above four": (192, 384, "int3", "int4", 64),
    "four bits": (384, 96, "int2", "int4", 32),
    "large": (768, 1408, "int2", "int3", 128),
    "int8": (160, 96, "int8", "int8", 0),
    "int8 with odd columns": (72, 40, "int8", "int8", 0),
    "int8 below int2": (64, 96, "int8", "int2", 32),
    "bfloat16": (160, 96, "bfloat16", "bfloat16", 0),
    "bfloat16 with odd columns": (72, 40, "bfloat16", "bfloat16", 0),
    "float16": (96, 104, "float16", "float16", 0),
}


@cache
def products(name):
    """(layout, slots, {matrix: (x, x times the matrix of the second slot)}) of a row of SHAPES, for the most TOKENS."""
    hidden, intermediate, up, down, group = SHAPES[name]
    layout, memory = a_pool(ExpertShape(hidden, intermediate, True), form(up, group), form(down, group), slots=2)
    inputs = {matrix: torch.randn(max(TOKENS), layout.shape.matrix(matrix)[1]) for matrix in MATRICES}
    views = layout.views(memory[1])
    return layout, memory, {m: (x, matrix_linear(x, views, m, layout, rounded=True)) for m, x in inputs.items()}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", SHAPES)
def test_a_matrix_equals_the_reference(isa, name):
    layout, memory, cases = products(name)
    kernel = native.NativeKernel(layout, memory, isa=isa)
    assert kernel.name == f"native {isa}"
    for matrix, (x, expected) in cases.items():
        for tokens in TOKENS:
            worst, rms = errors(kernel.linear(x[:tokens], 1, matrix), expected[:tokens])
            assert worst <= 1e-5 and rms <= 1e-5, (matrix, tokens, worst, rms)


@cache
def torchs(name):
    """(layout, slots, [(x, torch's output of the second slot)]) of experts in a 16-bit format."""
    layout, memory = a_pool(ExpertShape(192, 384, True), form(name), form(name), slots=2)
    reference, inputs = Reference(layout, memory), torch.randn(20, 4, 192).to(getattr(torch, name))
    outputs = torch.zeros(20, 4, 192)
    for x, out in zip(inputs, outputs, strict=True):
        reference(x, [1], one_expert(4), torch.ones(4), SWIGLU, out)
    return layout, memory, list(zip(inputs, outputs, strict=True))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_sixteen_bit_experts_round_where_torch_rounds(isa, name):
    """Equal to torch but where the order of a sum decides between two neighbours; a few such in 10,000."""
    layout, memory, cases = torchs(name)
    kernel, dtype, unlike = native.NativeKernel(layout, memory, isa=isa), getattr(torch, name), 0
    for x, expected in cases:
        found = torch.zeros(4, 192)
        kernel(x, [1], one_expert(4), torch.ones(4), SWIGLU, found)
        assert torch.equal(found, found.to(dtype).float())
        unlike += (found != expected).sum().item()
        assert errors(found, expected)[1] <= 2e-3
    assert unlike <= 0.02 * 20 * 4 * 192


def test_sixteen_bit_outputs_overflow_where_torchs_do():
    layout, memory = a_pool(ExpertShape(64, 64, True), form("float16"), form("float16"), slots=1)
    views = layout.views(memory[0])
    views["up.weight"].fill_(1 / 64)
    views["down.weight"].copy_(torch.eye(64) * torch.linspace(1, 2, 64)[:, None])
    kernel, reference = native.NativeKernel(layout, memory), Reference(layout, memory)
    for value in (300, 180, 200, 240, 255):  # 300: so does what lies between the matrices
        found, expected = torch.full((2, 1, 64), float("nan"))
        call = torch.full((1, 64), value).half(), [0], one_expert(1), torch.ones(1), SWIGLU
        kernel(*call, found)
        reference(*call, expected)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert expected.isinf().any() and expected.isfinite().any()


@pytest.mark.skipif(len(ISAS) < 2, reason="needs a machine with a second instruction set")
def test_kernels_of_two_instruction_sets_compute_at_once():
    """Each gives the bits of its own, whatever the other one does meanwhile, and whichever was made last."""
    layout, memory = a_pool(ExpertShape(192, 384, True), form("int2"), form("int3"), slots=1)
    x, routed, gates = torch.randn(4, 192), one_expert(4), torch.ones(4)

    def outputs(kernel: native.NativeKernel, times: int = 200) -> list[torch.Tensor]:
        found = torch.zeros(times, 4, 192)
        for out in found:
            kernel(x, [0], routed, gates, SWIGLU, out)
        return list(found)

    kernels, alone = [], []
    for isa in (ISAS[0], ISAS[-1]):  # one after the other is made and asked
        kernels.append(native.NativeKernel(layout, memory, isa=isa))
        alone.append(outputs(kernels[-1], 1)[0])
    assert not torch.equal(*alone), "these inputs do not tell the instruction sets apart"
    with ThreadPoolExecutor(2) as threads:
        both = list(threads.map(outputs, kernels))
    for kernel, expected, found in zip(kernels, alone, both, strict=True):
        assert all(torch.equal(expected, out) for out in found), kernel.name


def test_an_instruction_set_that_is_not_there():
    assert native.instruction_set("avx1024") is None


def test_an_old_library_is_not_used(monkeypatch):
    monkeypatch.setattr(native, "VERSION", 0)
    native.library.cache_clear()
    with pytest.warns(UserWarning, match="install it again"):
        assert native.library() is None
    native.library.cache_clear()
