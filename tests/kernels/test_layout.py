import itertools

import pytest
import torch

from apex_engine.kernels.layout import ALIGN, FIELD_ALIGN, FORMATS, ExpertShape, Layout, MatrixFormat, dequantize
from apex_engine.quantize.blob import make_blob

FORMS = [MatrixFormat(name, 32 if coding.planes else 0) for name, coding in FORMATS.items()]
SHAPES = [ExpertShape(96, 160, True), ExpertShape(64, 32, False), ExpertShape(64, 64, True, bias="bfloat16")]


def an_expert(shape: ExpertShape) -> dict[str, torch.Tensor]:
    expert = {f"{m}.weight": torch.randn(shape.matrix(m)).mul(0.02).bfloat16() for m in ("up", "down")}
    if shape.bias:
        expert |= {f"{m}.bias": torch.randn(shape.matrix(m)[0]).bfloat16() for m in ("up", "down")}
    return expert


@pytest.mark.parametrize(("shape", "up", "down"), itertools.product(SHAPES, FORMS, FORMS))
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
    described = Layout(SHAPES[0], *FORMS[:2]).describe()
    described["fields"]["down.scale"][2] += 64
    with pytest.raises(ValueError, match="incompatible"):
        Layout.parse(described)


def test_group_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="does not divide the 96 inputs of up"):
        _ = Layout(SHAPES[0], MatrixFormat("int2", 64), MatrixFormat("int2", 32)).stride


@pytest.mark.parametrize(
    ("name", "group", "message"),
    [
        ("int5", 64, "no format 'int5' for a matrix: there are int2, int3"),
        ("int2", 0, "int2 has groups, of a size above 0: 0"),
        ("int8", 64, "int8 has no groups: 64"),
    ],
)
def test_what_is_no_format(name, group, message):
    with pytest.raises(ValueError, match=message):
        MatrixFormat(name, group)


def test_the_description_that_checkpoints_carry():
    """To the letter: another one would make those on disk unreadable."""
    layout = Layout(ExpertShape(64, 32, False, "bfloat16"), MatrixFormat("int3", 32), MatrixFormat("int8"))
    assert layout.describe() == {
        "shape": {"hidden": 64, "intermediate": 32, "gated": False, "bias": "bfloat16"},
        "up": {"name": "int3", "group": 32},
        "down": {"name": "int8", "group": 0},
        "stride": 4096,
        "fields": {
            "up.codes0": ["uint8", [32, 16], 0],
            "up.codes1": ["uint8", [32, 8], 512],
            "up.scale": ["float16", [32, 2], 768],
            "up.zero": ["float16", [32, 2], 896],
            "up.bias": ["bfloat16", [32], 1024],
            "down.codes": ["int8", [64, 32], 1088],
            "down.scale": ["float32", [64], 3136],
            "down.bias": ["bfloat16", [64], 3392],
        },
    }


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


def test_raw_twin_is_the_source_bit_for_bit():
    shape = SHAPES[2]
    expert = an_expert(shape)
    layout = Layout(shape, MatrixFormat("bfloat16"), MatrixFormat("bfloat16"))
    blob, sums = make_blob(expert, layout, "clip")
    views = layout.views(blob)
    assert all(torch.equal(views[name], tensor) for name, tensor in expert.items())
    assert [error for error, _ in sums.values()] == [0.0, 0.0]
