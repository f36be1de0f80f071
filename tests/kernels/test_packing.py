import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from apex_engine.kernels.packing import GROUP_SIZES, PLANES, pack, unpack


@given(
    st.sampled_from(sorted(PLANES)), st.sampled_from(GROUP_SIZES), st.integers(1, 3), st.integers(1, 3), st.randoms()
)
def test_unpack_is_the_inverse_of_pack(bits, group, rows, groups, random):
    codes = torch.tensor(
        [[random.randrange(2**bits) for _ in range(groups * group)] for _ in range(rows)], dtype=torch.uint8
    )
    planes = pack(codes, bits, group)
    assert sum(plane.shape[-1] for plane in planes) * 8 == codes.shape[-1] * bits
    assert torch.equal(unpack(planes, bits, group), codes)


def test_two_bits_by_hand():
    """A group of 8: byte 0 holds codes 0, 2, 4, 6 from its low bits up, byte 1 codes 1, 3, 5, 7."""
    codes = torch.tensor([[3, 0, 1, 2, 0, 3, 2, 1]], dtype=torch.uint8)
    (plane,) = pack(codes, 2, 8)
    assert plane.tolist() == [[0b10_00_01_11, 0b01_11_10_00]]


def test_group_of_64_puts_code_j_16_32_48_in_byte_j():
    codes = torch.zeros(1, 64, dtype=torch.uint8)
    codes[0, [5, 21, 37, 53]] = torch.tensor([1, 2, 3, 1], dtype=torch.uint8)
    (plane,) = pack(codes, 2, 64)
    assert plane[0, 5] == 0b01_11_10_01
    assert plane.sum() == plane[0, 5]


def test_three_bits_are_a_low_plane_and_a_high_plane():
    codes = torch.tensor([[7, 0, 4, 3, 0, 0, 0, 5]], dtype=torch.uint8)
    low, high = pack(codes, 3, 8)
    assert low.tolist() == [[0b00_00_00_11, 0b01_00_11_00]]
    assert high.tolist() == [[0b1000_0101]]


def test_four_bits_by_hand():
    codes = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]], dtype=torch.uint8)
    (plane,) = pack(codes, 4, 8)
    assert plane.tolist() == [[0x51, 0x62, 0x73, 0x84]]


@pytest.mark.parametrize("bits", sorted(PLANES))
def test_every_code_survives_in_every_place(bits):
    for code in range(2**bits):
        codes = torch.full((1, 64), code, dtype=torch.uint8)
        assert torch.equal(unpack(pack(codes, bits, 64), bits, 64), codes)
