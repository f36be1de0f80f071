import pytest
import torch
from expert_pools import a_pool
from torch.nn.functional import silu

from apex_engine.kernels.layout import FORMATS, ExpertShape, MatrixFormat, dequantize
from apex_engine.kernels.reference import expert_ffn, round_inputs

SHAPES = [ExpertShape(96, 160, True), ExpertShape(64, 32, False), ExpertShape(64, 64, True, bias="bfloat16")]
FORMS = {name: MatrixFormat(name, 32 if coding.planes else 0) for name, coding in FORMATS.items()}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("up", "down"), [*zip(FORMS, FORMS, strict=True), ("int3", "int4")])
def test_reference_equals_dequantize_then_multiply(shape, up, down):
    layout, memory = a_pool(shape, FORMS[up], FORMS[down], slots=1)
    views = layout.views(memory[0])

    def activate(rows):
        gate, up = rows.chunk(2, -1) if shape.gated else (rows, 1)
        return silu(gate) * up

    x = torch.randn(5, shape.hidden)
    bias = {m: views[f"{m}.bias"].double() if shape.bias else 0.0 for m in ("up", "down")}
    hidden = activate(x.double() @ dequantize(views, "up", layout).double().T + bias["up"])
    expected = hidden @ dequantize(views, "down", layout).double().T + bias["down"]
    torch.testing.assert_close(expert_ffn(x, views, layout, activate).double(), expected, rtol=1e-4, atol=1e-6)


def test_rounding_inputs():
    x = torch.randn(3, 64)
    x[1, 32:] = 0
    rounded = round_inputs(x, 32)
    step = x.view(3, 2, 32).abs().amax(-1, keepdim=True) / 127
    assert ((rounded - x).view(3, 2, 32).abs() <= step * 0.5001).all()
    torch.testing.assert_close(round_inputs(rounded, 32), rounded)
