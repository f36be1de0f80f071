import pytest
from expert_pools import CLAMPED, SWIGLU

from apex_engine.kernels.base import Activation


def test_swiglu_is_found_by_trying():
    assert Activation.of(SWIGLU.apply, True, None).swiglu


@pytest.mark.parametrize(
    "other",
    [CLAMPED.apply, lambda rows: SWIGLU.apply(rows.clamp(max=7)), lambda rows: SWIGLU.apply(rows.flip(-1))],
    ids=["another gate", "clamped", "up before gate"],
)
def test_another_activation_is_not_taken_for_it(other):
    assert not Activation.of(other, True, None).swiglu
