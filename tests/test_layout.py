import itertools

import pytest
import torch
from torch.nn.functional import silu

from apex_engine.kernels.layout import ALIGN, FIELD_ALIGN, ExpertShape, Layout, MatrixFormat, dequantize
from apex_engine.kernels.reference import expert_ffn
from apex_engine.quantize.blob import make_blob

FORMATS = [
    MatrixFormat("int2", 32),
    MatrixFormat("int3", 32),
    MatrixFormat("int4", 32),
    MatrixFormat("int8"),
    MatrixFormat("bfloat16"),
]
SHAPES = [ExpertShape(96, 160, True), ExpertShape(64, 32, False), ExpertShape(64, 64, True, bias="bfloat16")]


def an_expert(shape: ExpertShape) -> dict[str, torch.Tensor]:
    expert = {f"{m}.weight": torch.randn(shape.matrix(m)).mul(0.02).bfloat16() for m in ("up", "down")}
    if shape.bias:
        expert |= {f"{m}.bias": torch.randn(shape.matrix(m)[0]).bfloat16() for m in ("up", "down")}
    return expert


@pytest.mark.parametrize(("shape", "up", "down"), itertools.product(SHAPES, FORMATS, FORMATS))
def test_fields_are_aligned_disjoint_and_described(shape, up, down):
    layout = Layout(shape, up, down)
    assert layout.stride % ALIGN == 0
    end = 0
    for field in layout.fields:
        assert field.offset % FIELD_ALIGN == 0 and field.offset >= end
        end = field.offset + field.nbytes
    assert end <= layout.stride < end + ALIGN
    assert Layout.parse(layout.describe()) == layout


def test_parse_refuses_offsets_of_another_version():
    described = Layout(SHAPES[0], *FORMATS[:2]).describe()
    described["fields"]["down.scale"][2] += 64
    with pytest.raises(ValueError, match="incompatible"):
        Layout.parse(described)


def test_group_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="does not divide the 96 inputs of up"):
        _ = Layout(SHAPES[0], MatrixFormat("int2", 64), MatrixFormat("int2", 32)).stride


def test_int2_blob_by_hand():
    """One group of 8 codes, scale 0.5, zero 1: the weights are (q - 1) / 2."""
    layout = Layout(ExpertShape(8, 8, False), MatrixFormat("int2", 8), MatrixFormat("int2", 8))
    blob = torch.zeros(layout.stride, dtype=torch.uint8)
    offset = {field.name: field.offset for field in layout.fields}
    blob[offset["up.codes0"] : offset["up.codes0"] + 2] = torch.tensor(
        [0b10_00_01_11, 0b01_11_10_00], dtype=torch.uint8
    )
    blob[offset["up.scale"] : offset["up.scale"] + 2] = torch.tensor([0x00, 0x38], dtype=torch.uint8)  # float16 0.5
    blob[offset["up.zero"] : offset["up.zero"] + 2] = torch.tensor([0x00, 0x3C], dtype=torch.uint8)  # float16 1.0
    row = dequantize(layout.views(blob), "up", layout)[0]
    assert row.tolist() == [1.0, -0.5, 0.0, 0.5, -0.5, 1.0, 0.5, 0.0]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMATS)
def test_reference_equals_dequantize_then_multiply(shape, form):
    layout = Layout(shape, form, form)
    blob, _ = make_blob(an_expert(shape), layout, "clip")
    views = layout.views(blob)

    def activate(rows):
        gate, up = rows.chunk(2, -1) if shape.gated else (rows, 1)
        return silu(gate) * up

    x = torch.randn(5, shape.hidden)
    bias = {m: views[f"{m}.bias"].double() if shape.bias else 0.0 for m in ("up", "down")}
    hidden = activate(x.double() @ dequantize(views, "up", layout).double().T + bias["up"])
    expected = hidden @ dequantize(views, "down", layout).double().T + bias["down"]
    torch.testing.assert_close(expert_ffn(x, views, layout, activate).double(), expected, rtol=1e-4, atol=1e-6)


def test_raw_twin_is_the_source_bit_for_bit():
    shape = SHAPES[2]
    expert = an_expert(shape)
    layout = Layout(shape, MatrixFormat("bfloat16"), MatrixFormat("bfloat16"))
    blob, sums = make_blob(expert, layout, "clip")
    views = layout.views(blob)
    assert all(torch.equal(views[name], tensor) for name, tensor in expert.items())
    assert [error for error, _ in sums.values()] == [0.0, 0.0]
