"""The Triton kernels against the plain expert: interpreted where there is no GPU, compiled where there is one."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from expert_pools import CLAMPED, DEVICE, NORMED, SWIGLU, fill
from torch.nn.functional import silu

from apex_engine.errors import ApexError
from apex_engine.kernels.base import Activation, Routed
from apex_engine.kernels.layout import ExpertShape, Layout, MatrixFormat, dequantize
from apex_engine.kernels.reference import Reference

pytest.importorskip("triton", reason="needs triton, which has no build for this platform")

from apex_engine.kernels.triton import launch, tiles
from apex_engine.kernels.triton.kernel import TritonKernel

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TOLERANCE = {F32: 1e-5, BF16: 2e-3, F16: 2e-3}  # of the largest, and of the RMS, value of the output
INT2, INT3, INT4 = (MatrixFormat(f"int{bits}", 64) for bits in (2, 3, 4))
INT8, RAW_BF16, RAW_F16 = map(MatrixFormat, ("int8", "bfloat16", "float16"))


@pytest.fixture
def few_programs(monkeypatch):
    """The interpreter runs one program after the other: fewer and larger ones than those of the table."""
    if DEVICE == "cpu":
        launch.launch.cache_clear()
        for table in (tiles.GEMV, tiles.GEMM):
            for key, blocks in table.items():
                monkeypatch.setitem(table, key, blocks._replace(rows=256))
    yield
    launch.launch.cache_clear()


@dataclass(frozen=True)
class Case:
    """`edge` is what it is there for. `slots`: of the pool; `experts` of them are called, the rest is poison."""

    edge: str
    up: MatrixFormat = INT2
    down: MatrixFormat = INT2
    hidden: int = 128
    intermediate: int = 64
    tokens: int = 2
    choices: int = 1
    slots: int = 6
    experts: int = 3
    dtype: torch.dtype = F32
    activation: Activation = SWIGLU
    gated: bool = True
    bias: str = ""

    @property
    def layout(self) -> Layout:
        return Layout(ExpertShape(self.hidden, self.intermediate, self.gated, self.bias), self.up, self.down)


def group(form: MatrixFormat, size: int) -> MatrixFormat:
    return replace(form, group=size)


DECODE = [
    Case("one token, one expert, one slot", tokens=1, choices=1, slots=1, experts=1),
    Case("two slots", tokens=1, choices=2, slots=2, experts=2),
    Case("I of Qwen3: twelve groups, not a power of two", hidden=768, intermediate=192, tokens=1, choices=2),
    Case("K of OLMoE's third: three groups", hidden=192, intermediate=384, tokens=1),
    Case("K = 640: ten groups in tiles of eight", hidden=640, intermediate=64, tokens=1),
    Case("I = 1408", hidden=64, intermediate=1408, tokens=1, choices=1, experts=2),
    Case("60 slots, most without a token", hidden=64, tokens=3, choices=2, slots=60, experts=60),
    Case("16 tokens: the most of a decode step", INT8, INT8, 64, tokens=16, choices=1),
    Case("5 tokens, all on every expert", INT8, INT8, 64, tokens=5, choices=4, experts=4),
    Case("smallest group: two bytes a run", group(INT2, 8), group(INT2, 8), 96, 160),
    Case("group 16", group(INT2, 16), group(INT2, 16), 96, 160),
    Case("group 32 does not fill a tile", group(INT2, 32), group(INT2, 32), 96, 160),
    Case("largest group", group(INT2, 256), group(INT2, 128), 256, 128),
    Case("int3: two planes", INT3, INT3, 192, 128),
    Case("int3, smallest group: one byte in the second plane", group(INT3, 8), group(INT3, 8), 96, 160),
    Case("int4", INT4, INT4, 192, 128),
    Case("int4, largest group: a run as long as a tile", group(INT4, 256), group(INT4, 32), 256, 96),
    Case("int8", INT8, INT8, 192, 160),
    Case("int8 down with odd K, up with odd N", INT8, INT8, 96, 7),
    Case("bfloat16", RAW_BF16, RAW_BF16, 192, 160),
    Case("float16, odd everywhere", RAW_F16, RAW_F16, 33, 7),
    Case("the fragile matrix at 3 bits", INT2, INT3, 128, 192, choices=2, experts=4),
    Case("matrices of two kinds", INT8, INT4, 96, 64),
    Case("int3 above int4", INT3, INT4, 192, 128),
    Case("bfloat16 biases", hidden=64, bias="bfloat16"),
    Case("float16 biases on int8", INT8, INT8, 64, 96, bias="float16"),
    Case("an activation of its own", activation=CLAMPED),
    Case("an activation of its own on 16-bit x", RAW_BF16, RAW_BF16, 96, 64, dtype=BF16, activation=CLAMPED),
    Case("no gate", activation=Activation(silu), gated=False, bias="float32"),
    Case("no gate, N = 7", RAW_F16, RAW_F16, 64, 7, activation=Activation(silu), gated=False),
    Case("norm before the gate weight", activation=NORMED, choices=2, experts=4),
    Case("bfloat16 x, int2", dtype=BF16, choices=2, experts=4),
    Case("float16 x, int2", dtype=F16),
    Case("bfloat16 x, int8", INT8, INT8, dtype=BF16),
    Case("bfloat16 x, bfloat16", RAW_BF16, RAW_BF16, dtype=BF16),
]
PREFILL = [
    Case("17 tokens: the least of a prefill step", tokens=17, choices=2, experts=4),
    Case("17 tokens of float16", tokens=17, choices=2, experts=4, dtype=F16),
    Case("17 tokens of bfloat16", tokens=17, choices=2, experts=4, dtype=BF16),
    Case("K = 640, three slots", hidden=640, tokens=17, choices=2, slots=3, experts=2),
    Case("I = 384", hidden=64, intermediate=384, tokens=17, choices=1, experts=2),
    Case("60 slots, tiles of a few tokens", INT8, INT8, 64, tokens=20, choices=2, slots=60, experts=60),
    Case("smallest group goes in two 16-bit parts", group(INT2, 8), group(INT2, 8), 96, 160, 17, dtype=BF16),
    Case("group 16 in float32", group(INT2, 16), group(INT2, 16), 96, 160, 17),
    Case("group 32 does not fill a tile", group(INT2, 32), group(INT2, 32), 96, 160, 17, dtype=F16),
    Case("largest group in several tiles", group(INT2, 256), group(INT2, 128), 256, 128, 17),
    Case("int3: two planes", INT3, INT3, 192, 128, 17),
    Case("int3 on bfloat16 x", INT3, INT3, 192, 128, 17, dtype=BF16),
    Case("int3, smallest group", group(INT3, 8), group(INT3, 8), 96, 64, 17),
    Case("int4", INT4, INT4, 192, 128, 17),
    Case("int4 of two group sizes", group(INT4, 256), group(INT4, 16), 256, 96, 17, dtype=F16),
    Case("int8 on bfloat16 x", INT8, INT8, 192, 96, 17, dtype=BF16),
    Case("int8, odd K and N", INT8, INT8, 96, 7, 17),
    Case("bfloat16", RAW_BF16, RAW_BF16, 192, 96, 17),
    Case("bfloat16 on bfloat16 x", RAW_BF16, RAW_BF16, 192, 96, 17, dtype=BF16),
    Case("float16, odd everywhere", RAW_F16, RAW_F16, 33, 7, 17, dtype=F16),
    Case("matrices of two kinds", INT2, RAW_BF16, 128, 64, 17),
    Case("int3 above int4", INT3, INT4, 192, 64, 17),
    Case("biases", tokens=17, choices=2, experts=4, bias="bfloat16"),
    Case("an activation of its own", tokens=17, activation=CLAMPED, dtype=BF16),
    Case("no gate", tokens=17, activation=Activation(silu), gated=False, bias="float16"),
    Case("norm before the gate weight", tokens=17, choices=2, experts=4, activation=NORMED),
]
AS_TUNED = [
    Case("decode: the last tile of rows is cut", INT8, INT8, 72, 40, tokens=1),
    Case("decode of int2: the last tile of rows is cut", group(INT2, 8), group(INT2, 8), 72, 40, tokens=1),
    Case("17 tokens", tokens=17, choices=2, experts=4),
    Case("tiles of 64, the last one cut", tokens=70, choices=1, experts=1, slots=2, dtype=BF16),
    Case("tiles of 64 with float32 are smaller", tokens=70, choices=1, experts=1, slots=2),
    Case("N of both matrices cut by the tile", hidden=96, intermediate=160, tokens=17, up=INT8, down=INT8),
    Case("N of both matrices cut by the tile of 16-bit x", INT8, INT8, 96, 160, 17, dtype=F16),
]


def pool(case: Case, called: list[int]) -> torch.Tensor:
    memory = torch.full((case.slots, case.layout.stride), 0xFF, dtype=torch.uint8)  # NaN in every float format
    for slot in called:
        fill(case.layout.views(memory[slot]), case.layout)
    return memory.to(DEVICE)


def route(case: Case) -> Routed:
    """Each token chooses among the experts but the second, which has none; a token in four drops its last choice."""
    able = [e for e in range(case.experts) if e != 1 or case.experts <= case.choices]
    chosen = np.array([np.random.permutation(able)[: case.choices] for _ in range(case.tokens)])
    chosen[3::4, -1] = -1  # nobody serves this pair
    pairs = [np.nonzero(chosen == e) for e in range(case.experts)]
    tokens = np.concatenate([t for t, _ in pairs])
    rows = tokens * chosen.shape[1] + np.concatenate([c for _, c in pairs])
    return Routed(np.cumsum([0, *(len(t) for t, _ in pairs)]), tokens, rows)


def relative_error(found: torch.Tensor, expected: torch.Tensor, limit: float) -> str:
    """ "" or what is wrong and where: largest and RMS error against the largest and RMS value."""
    missed = (found.double() - expected.double()).abs()
    scale = expected.double().abs().max()
    largest, rms = (missed.max() / scale).item(), (missed.norm() / expected.double().norm()).item()
    if largest <= limit and rms <= limit:
        return ""
    bad = [tuple(at) for at in (~(missed <= limit * scale)).nonzero().tolist()]
    shown = ", ".join(f"{at}: {found[at]:.6g} for {expected[at]:.6g}" for at in bad[:6])
    return f"largest {largest:.2e}, RMS {rms:.2e}, allowed {limit:.0e}; {len(bad)} of {missed.numel()} values are off: {shown}"


def check(case: Case) -> None:
    np.random.seed(0)
    slots = np.random.permutation(case.slots)[: case.experts].tolist()
    memory, routed = pool(case, slots), route(case)
    x = torch.randn(case.tokens, case.hidden).to(DEVICE, case.dtype)
    rows = case.tokens * case.choices
    gates = torch.rand(rows, device=DEVICE)
    expected, found = (torch.full((rows, case.hidden), float("nan"), device=DEVICE) for _ in range(2))
    plain = case.activation
    if (
        case.tokens > tiles.DECODE_TOKENS
    ):  # rounded between the matrices, as the module says: the rest is held to account
        plain = replace(plain, apply=lambda rows: case.activation.apply(rows).to(case.dtype).float())
    Reference(case.layout, memory)(x.float(), slots, routed, gates, plain, expected)
    TritonKernel(case.layout, memory)(x, slots, routed, gates, case.activation, found)
    served = torch.zeros(rows, dtype=torch.bool)
    served[routed.rows] = True
    assert found[~served].isnan().all(), "a row was written that nobody serves"
    assert not (wrong := relative_error(found[served], expected[served], TOLERANCE[case.dtype])), wrong


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("case", DECODE, ids=lambda case: case.edge)
def test_decode(case):
    check(case)


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("case", PREFILL, ids=lambda case: case.edge)
def test_prefill(case):
    check(case)


@pytest.mark.parametrize("case", AS_TUNED, ids=lambda case: case.edge)
def test_in_the_tiles_of_the_table(case):
    check(case)


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("tokens", range(1, 18))
def test_any_number_of_tokens(tokens):
    check(Case("", INT8, INT8, 64, tokens=tokens, slots=3, experts=3))


def test_no_tokens():
    layout = Case("").layout
    kernel = TritonKernel(layout, torch.zeros(2, layout.stride, dtype=torch.uint8, device=DEVICE))
    none = np.zeros(0, np.int64)
    empty = torch.zeros(0, device=DEVICE)
    for slots in ([], [0, 1]):
        routed = Routed(np.zeros(len(slots) + 1, np.int64), none, none)
        kernel(empty.view(0, 128), slots, routed, empty, SWIGLU, empty.view(0, 128))


def test_a_code_by_hand():
    """One token sees one input at a time: the output is the column of the up matrix, code by code."""
    case = Case("", group(INT3, 16), RAW_F16, 32, 32, gated=False)
    memory = pool(case, [0])
    views = case.layout.views(memory[0])
    views["down.weight"].copy_(torch.eye(32))
    out = torch.full((32, 32), float("nan"), device=DEVICE)
    routed = Routed(np.array([0, 32]), np.arange(32), np.arange(32))
    x, gates = torch.eye(32, device=DEVICE), torch.ones(32, device=DEVICE)
    TritonKernel(case.layout, memory)(x, [0], routed, gates, Activation(lambda rows: rows), out)
    torch.testing.assert_close(out.T, dequantize(views, "up", case.layout), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": torch.zeros(2, 64)}, r"x is \[2, 64\]"),
        ({"x": torch.zeros(2, 128, dtype=torch.float64)}, "float64, not"),
        ({"out": torch.zeros(4, 128, dtype=torch.bfloat16)}, "out is .*bfloat16"),
        ({"gates": torch.zeros(3)}, r"gates are \[3\]"),
        ({"slots": [6]}, r"slots 6\.\.6 are not in 0\.\.5"),
        ({"slots": [0, 1]}, "2 slots, but groups begin"),
        ({"routed": Routed(np.array([0, 1]), np.array([2]), np.array([0]))}, r"tokens 2\.\.2 are not"),
        ({"routed": Routed(np.array([0, 1]), np.array([0]), np.array([4]))}, r"rows 4\.\.4 are not"),
        ({"routed": Routed(np.array([0, 2]), np.array([0]), np.array([0]))}, "1 tokens and 1 rows in groups of 2"),
    ],
)
def test_what_would_leave_its_tensors_is_refused(changed: dict[str, Any], message):
    layout = Case("").layout
    kernel = TritonKernel(layout, torch.zeros(6, layout.stride, dtype=torch.uint8, device=DEVICE))
    call: dict[str, Any] = {
        "x": torch.zeros(2, 128),
        "slots": [0],
        "routed": Routed(np.array([0, 1]), np.array([0]), np.array([0])),
        "gates": torch.zeros(4),
        "activation": SWIGLU,
        "out": torch.zeros(4, 128),
    } | changed
    moved = {name: value.to(DEVICE) if torch.is_tensor(value) else value for name, value in call.items()}
    with pytest.raises(ApexError, match=message):
        kernel(**moved)


def test_slots_of_another_layout_are_refused():
    with pytest.raises(ApexError, match="are not uint8"):
        TritonKernel(Case("").layout, torch.zeros(2, 4096, dtype=torch.uint8, device=DEVICE))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("tokens", [1, 16, 200])
@pytest.mark.parametrize("form", [INT2, INT3, INT4, INT8, RAW_BF16], ids=lambda form: form.name)
def test_real_sizes_on_the_device(form, tokens, dtype):
    if form is RAW_BF16 and dtype is F16:
        pytest.skip("a bfloat16 checkpoint does not run in float16")
    check(Case("", form, form, 2048, 768, tokens, choices=8, slots=64, experts=60, dtype=dtype))
