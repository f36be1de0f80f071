"""The CPU kernels against the reference with rounded inputs, on every instruction set this machine has."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.nn.functional import gelu, silu

from apex_engine.errors import ApexError
from apex_engine.kernels import registry as pick
from apex_engine.kernels.base import Activation, Routed
from apex_engine.kernels.cpu import native
from apex_engine.kernels.layout import ExpertShape, Layout, MatrixFormat
from apex_engine.kernels.reference import Reference, matrix_linear, round_inputs
from apex_engine.quantize.blob import make_blob

ISAS = [isa for isa in ("avx512-vnni", "avx2", "neon", "generic") if native.instruction_set(isa)]
SWIGLU = Activation(lambda rows: silu(rows.chunk(2, -1)[0]) * rows.chunk(2, -1)[1], swiglu=True)
ANOTHER = Activation(lambda rows: gelu(rows.chunk(2, -1)[0]) * (rows.chunk(2, -1)[1] + 1))
NO_GATE = Activation(lambda rows: rows.relu().square())
NORMED = Activation(SWIGLU.apply, finish=lambda y: y / y.norm(dim=-1, keepdim=True), swiglu=True)

# (hidden, intermediate, up bits, down bits, group): each names the edge it hits
SHAPES = {
    "one whole block": (256, 256, 2, 2, 64),
    "demo": (192, 384, 2, 2, 64),
    "half a block at the end": (96, 160, 2, 2, 32),
    "groups of a quarter lane": (64, 96, 2, 2, 8),
    "sixteen groups a block": (640, 64, 2, 2, 16),
    "a group longer than a register": (256, 768, 4, 4, 256),
    "three bits": (192, 192, 3, 3, 64),
    "three bits in groups too short for the high plane": (160, 96, 2, 3, 16),
    "four bits": (384, 96, 2, 4, 32),
    "large": (768, 1408, 2, 3, 128),
    "int8": (160, 96, 8, 8, 0),
    "int8 with odd columns": (72, 40, 8, 8, 0),
    "int8 below int2": (64, 96, 8, 2, 32),
    "bfloat16": (160, 96, 16, 16, 0),
    "bfloat16 with odd columns": (72, 40, 16, 16, 0),
    "float16": (96, 104, 160, 160, 0),
}


def form(bits: int, group: int) -> MatrixFormat:
    plain = {8: "int8", 16: "bfloat16", 160: "float16"}
    return MatrixFormat(plain[bits]) if bits in plain else MatrixFormat(f"int{bits}", group)


def a_pool(shape: ExpertShape, up: MatrixFormat, down: MatrixFormat, slots: int = 3) -> tuple[Layout, torch.Tensor]:
    """Slots of random experts; the last one is poison."""
    layout = Layout(shape, up, down)
    memory = torch.full((slots + 1, layout.stride), 0xFF, dtype=torch.uint8)
    for slot in range(slots):
        expert = {f"{m}.weight": torch.randn(shape.matrix(m)) * 0.02 for m in ("up", "down")}
        if shape.bias:
            expert |= {f"{m}.bias": torch.randn(shape.matrix(m)[0]).bfloat16() for m in ("up", "down")}
        memory[slot] = make_blob(expert, layout, "clip")[0]
    return layout, memory


def errors(found: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """(max, RMS) relative error."""
    difference = found.double() - expected.double()
    most, mean = expected.double().abs().max(), expected.double().square().mean().sqrt()
    return (difference.abs().max() / most).item(), (difference.square().mean().sqrt() / mean).item()


def kernels_of(layout, memory):
    found = [native.NativeKernel(layout, memory)]
    if layout.up.grouped and layout.down.grouped and pick.find_spec("numba"):
        found.append(pick.pick("numba", layout, memory))
    return found


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", SHAPES)
def test_a_matrix_equals_the_reference(isa, name):
    hidden, intermediate, up, down, group = SHAPES[name]
    layout, memory = a_pool(ExpertShape(hidden, intermediate, True), form(up, group), form(down, group), slots=2)
    kernel = native.NativeKernel(layout, memory, isa=isa)
    assert kernel.name == f"native {isa}"
    for tokens in (1, 2, 3, 4, 5, 16, 17, 40):
        for matrix in ("up", "down"):
            x = torch.randn(tokens, layout.shape.matrix(matrix)[1])
            expected = matrix_linear(x, layout.views(memory[1]), matrix, layout, rounded=True)
            worst, rms = errors(kernel.linear(x, 1, matrix), expected)
            assert worst <= 1e-5 and rms <= 1e-5, (matrix, tokens, worst, rms)


@pytest.mark.parametrize("name", [name for name in SHAPES if SHAPES[name][4]])
def test_numba_equals_the_reference(name):
    pytest.importorskip("numba")
    hidden, intermediate, up, down, group = SHAPES[name]
    if up not in (2, 3, 4):
        pytest.skip("int8 is not numba's")
    layout, memory = a_pool(ExpertShape(hidden, intermediate, True), form(up, group), form(down, group), slots=1)
    kernel = pick.pick("numba", layout, memory)
    for tokens in (1, 3):
        for matrix in ("up", "down"):
            x = torch.randn(tokens, layout.shape.matrix(matrix)[1])
            expected = matrix_linear(x, layout.views(memory[0]), matrix, layout, rounded=True)
            worst, rms = errors(kernel.linear(x, 0, matrix), expected)
            assert worst <= 1e-5 and rms <= 1e-5, (matrix, tokens, worst, rms)


@pytest.mark.parametrize("bits", [2, 8])
@pytest.mark.parametrize(
    ("activation", "gated", "bias"),
    [(SWIGLU, True, ""), (ANOTHER, True, ""), (NO_GATE, False, ""), (SWIGLU, True, "bfloat16"), (NORMED, True, "")],
    ids=["swiglu", "another gate", "no gate", "bias", "norm"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_routed_experts(bits, activation, gated, bias, dtype):
    """Five tokens, two choices each, over two of three experts; the rest of the output and the poisoned slot stay out of it."""
    layout, memory = a_pool(ExpertShape(96, 64, gated, bias), form(bits, 32), form(bits, 32))
    x, gates = torch.randn(5, 96).to(dtype), torch.rand(10)
    tokens, choices = np.array([0, 2, 4, 1, 2]), np.array([0, 1, 0, 1, 0])
    routed = Routed(np.array([0, 3, 5]), tokens, tokens * 2 + choices)
    expected = torch.full((10, 96), float("nan"))
    Reference(layout, memory, round_inputs=True)(x.float(), [2, 0], routed, gates, activation, expected)
    for kernel in kernels_of(layout, memory):
        out = torch.full((10, 96), float("nan"))
        kernel(x, [2, 0], routed, gates, activation, out)
        assert torch.equal(out.isnan(), expected.isnan()) and out.isnan().any(1).sum() == 5
        # a hidden value that lies between two int8 codes may be rounded either way: one step of 127 in one of 32
        worst, rms = errors(out[routed.rows], expected[routed.rows])
        assert worst <= 2e-3 and rms <= 2e-3, (kernel.name, worst, rms)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", ["bfloat16", "float16"])
def test_sixteen_bit_experts_round_where_torch_rounds(isa, form):
    """Equal to torch but where the order of a sum decides between two neighbours; a few such in 10,000."""
    layout, memory = a_pool(ExpertShape(192, 384, True), MatrixFormat(form), MatrixFormat(form), slots=2)
    kernel, pairs, dtype = native.NativeKernel(layout, memory, isa=isa), np.arange(4), getattr(torch, form)
    routed, gates, unlike = Routed(np.array([0, 4]), pairs, pairs), torch.ones(4), 0
    for _ in range(20):
        x = torch.randn(4, 192).to(dtype)
        found, expected = torch.zeros(2, 4, 192)
        kernel(x, [1], routed, gates, SWIGLU, found)
        Reference(layout, memory)(x, [1], routed, gates, SWIGLU, expected)
        assert torch.equal(found, found.to(dtype).float())
        unlike += (found != expected).sum().item()
        assert errors(found, expected)[1] <= 2e-3
    assert unlike <= 0.02 * 20 * 4 * 192


@pytest.mark.skipif(len(ISAS) < 2, reason="needs a machine with a second instruction set")
def test_kernels_of_two_instruction_sets_compute_at_once():
    """Each gives the bits of its own, whatever the other one does meanwhile, and whichever was made last."""
    layout, memory = a_pool(ExpertShape(192, 384, True), form(2, 64), form(3, 64), slots=1)
    x, pairs = torch.randn(4, 192), np.arange(4)
    routed, gates = Routed(np.array([0, 4]), pairs, pairs), torch.ones(4)

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


def beside_torch(kernel, layout, memory, x, slots, routed, gates):
    """What the kernel puts in an output of NaN, and what torch does."""
    found, expected = torch.full((2, len(gates), layout.shape.hidden), float("nan"))
    kernel(x, slots, routed, gates, SWIGLU, found)
    Reference(layout, memory)(x, slots, routed, gates, SWIGLU, expected)
    return found, expected


class TestLikeTorch:
    """One bfloat16 token gives torch's own bits, where the machine's torch sums as `native` knows how to."""

    @pytest.fixture
    def make(self):
        def kernel(hidden: int, intermediate: int) -> tuple[Layout, torch.Tensor, native.NativeKernel]:
            layout, memory = a_pool(ExpertShape(hidden, intermediate, True), form(16, 0), form(16, 0), slots=2)
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
    def test_experts(self, make, hidden, intermediate):
        layout, memory, kernel = make(hidden, intermediate)
        assert kernel.name == "native avx512-bf16"
        pair, gates = np.arange(1), torch.rand(4)
        one, each = (
            Routed(np.array([0, 1]), pair, pair),
            Routed(np.array([0, 1, 2]), np.zeros(2, np.int64), np.arange(2)),
        )
        three = Routed(np.array([0, 1, 4]), np.array([0, 0, 1, 2]), np.arange(4))
        for scale in (0.01, 1, 100):
            x = (torch.randn(3, hidden) * scale).bfloat16()
            found, expected = beside_torch(kernel, layout, memory, x[:1], [1, 0], each, gates[:2])
            assert torch.equal(found, expected) and expected.any()
            # one expert has three tokens: torch's
            found, expected = beside_torch(kernel, layout, memory, x, [1, 0], three, gates)
            assert torch.equal(found, expected)
            # another dtype: torch's
            found, expected = beside_torch(kernel, layout, memory, x[:1].float(), [1], one, gates[:1])
            assert torch.equal(found, expected)

    @pytest.mark.filterwarnings("ignore:TF32")  # `flags` sets it too
    def test_with_other_settings_than_tried_it_is_torchs(self, make, monkeypatch):
        _, _, kernel = make(192, 384)
        assert kernel._most_tokens(torch.bfloat16) == 1
        monkeypatch.setattr(torch, "get_num_threads", lambda: 61)
        assert kernel._most_tokens(torch.bfloat16) == 0
        monkeypatch.undo()
        with torch.backends.mkldnn.flags(enabled=False):
            assert kernel._most_tokens(torch.bfloat16) == 0
        assert kernel._most_tokens(torch.bfloat16) == 1

    @pytest.mark.parametrize("up", [1, -0.71, 1e30])
    def test_silu_of_every_normal_number(self, make, up):
        layout, memory, kernel = make(240, 240)  # not a whole number of torch's vectors
        numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
        x, views, pair = torch.zeros(1, 240, dtype=torch.bfloat16), layout.views(memory[0]), np.arange(1)
        x[0, 0], routed = 1, Routed(np.array([0, 1]), pair, pair)
        views["up.weight"].zero_()
        views["up.weight"][240:, 0] = up
        views["down.weight"].copy_(torch.eye(240))
        for gates in numbers[numbers.isfinite()].split(240):
            views["up.weight"][: len(gates), 0] = gates
            found, expected = beside_torch(kernel, layout, memory, x, [0], routed, torch.ones(1))
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)

    def test_subnormal_sums_are_zero(self, make):
        layout, memory, kernel = make(2048, 1408)
        for scale in (1e-38, 1e-37, 1e-36):
            x = (torch.randn(1, 2048) * scale).bfloat16()
            weight = layout.views(memory[0])["up.weight"]
            assert torch.equal(kernel.linear(x.float(), 0, "up").bfloat16(), torch.nn.functional.linear(x, weight))

    def test_the_defaults_of_torch_do_not_matter(self, make):
        make(192, 384)
        layout = Layout(ExpertShape(192, 384, True), form(16, 0), form(16, 0))
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

    def test_the_trial_tells_another_order(self, make, monkeypatch):
        make(192, 384)
        layout = Layout(ExpertShape(192, 384, True), form(16, 0), form(16, 0))
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
    def test_what_it_does_not_know(self, parts):
        hidden, intermediate, name, bias = parts
        layout = Layout(ExpertShape(hidden, intermediate, True, bias), MatrixFormat(name), MatrixFormat(name))
        memory = torch.zeros(1, layout.stride, dtype=torch.uint8)
        assert not native.sums_like_torch(layout, memory)
        assert pick.pick("auto", layout, memory, bit_equal=True).name == "torch"


def test_sixteen_bit_outputs_overflow_where_torchs_do():
    layout, memory = a_pool(ExpertShape(64, 64, True), form(160, 0), form(160, 0), slots=1)
    pair, views = np.arange(1), layout.views(memory[0])
    views["up.weight"].fill_(1 / 64)
    views["down.weight"].copy_(torch.eye(64) * torch.linspace(1, 2, 64)[:, None])
    for value in (300, 180, 200, 240, 255):  # 300: so does what lies between the matrices
        x, routed = torch.full((1, 64), value).half(), Routed(np.array([0, 1]), pair, pair)
        kernel = native.NativeKernel(layout, memory)
        found, expected = beside_torch(kernel, layout, memory, x, [0], routed, torch.ones(1))
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert expected.isinf().any() and expected.isfinite().any()


def test_an_old_library_is_not_used(monkeypatch):
    monkeypatch.setattr(native, "VERSION", 0)
    native.library.cache_clear()
    with pytest.warns(UserWarning, match="install it again"):
        assert native.library() is None
    native.library.cache_clear()


def test_nothing_to_do():
    layout, memory = a_pool(ExpertShape(64, 64, True), form(2, 32), form(2, 32))
    empty = np.zeros(0, np.int64)
    for kernel in kernels_of(layout, memory):
        out = torch.full((2, 64), float("nan"))
        kernel(torch.zeros(1, 64), [], Routed(np.array([0]), empty, empty), torch.ones(2), SWIGLU, out)
        kernel(torch.zeros(1, 64), [1], Routed(np.array([0, 0]), empty, empty), torch.ones(2), SWIGLU, out)
        assert out.isnan().all()


def test_a_tokens_result_does_not_depend_on_the_others():
    layout, memory = a_pool(ExpertShape(192, 384, True), form(2, 64), form(3, 64))
    x = torch.randn(70, 192)
    for kernel in kernels_of(layout, memory):
        together, alone = torch.empty(70, 192), torch.empty(70, 192)
        pairs = np.arange(70)
        kernel(x, [1], Routed(np.array([0, 70]), pairs, pairs), torch.ones(70), SWIGLU, together)
        for t in range(70):
            kernel(x, [1], Routed(np.array([0, 1]), pairs[t : t + 1], pairs[t : t + 1]), torch.ones(70), SWIGLU, alone)
        assert torch.equal(together, alone), kernel.name


def test_rounding_inputs():
    x = torch.randn(3, 64)
    x[1, 32:] = 0
    rounded = round_inputs(x, 32)
    step = x.view(3, 2, 32).abs().amax(-1, keepdim=True) / 127
    assert ((rounded - x).view(3, 2, 32).abs() <= step * 0.5001).all()
    torch.testing.assert_close(round_inputs(rounded, 32), rounded)


class TestPick:
    LOW = (ExpertShape(64, 64, True), MatrixFormat("int2", 32), MatrixFormat("int2", 32))
    HIGH = (ExpertShape(64, 64, True), MatrixFormat("bfloat16"), MatrixFormat("bfloat16"))

    def name(self, kernels, parts):
        layout = Layout(*parts)
        return pick.pick(kernels, layout, torch.zeros(1, layout.stride, dtype=torch.uint8)).name

    def test_the_fastest_is_picked_and_named(self):
        assert self.name("auto", self.LOW) == f"native {native.instruction_set()}"
        assert self.name("auto", self.HIGH) == f"native {native.instruction_set()}"

    def test_any_can_be_forced(self):
        assert self.name("torch", self.LOW) == "torch"
        assert self.name("numba", self.LOW) == "numba"
        assert self.name("torch", self.HIGH) == self.name("numba", self.HIGH) == "torch"

    def test_without_a_compiler_the_next_best_is_taken(self, monkeypatch):
        monkeypatch.setattr(native, "library", lambda: None)
        assert self.name("auto", self.LOW) == "numba"
        with pytest.raises(ApexError, match="C compiler"):
            self.name("native", self.LOW)
        monkeypatch.setattr(pick, "find_spec", lambda name: None)
        assert self.name("auto", self.LOW) == "torch"

    def test_triton_needs_a_gpu(self):
        with pytest.raises(ApexError, match="CUDA device"):
            self.name("triton", self.LOW)


def test_swiglu_is_found_by_trying():
    assert Activation.of(SWIGLU.apply, True, None).swiglu
    for other in (
        ANOTHER.apply,
        lambda rows: SWIGLU.apply(rows.clamp(max=7)),
        lambda rows: SWIGLU.apply(rows.flip(-1)),
    ):
        assert not Activation.of(other, True, None).swiglu
