import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apex_engine.checkpoint.moments import MatrixMoments
from apex_engine.kernels.layout import MatrixFormat
from apex_engine.quantize.methods import clip, gptq
from apex_engine.quantize.methods.encode import encode
from apex_engine.quantize.methods.gptq import STEP, Block, feeds_back, refine


def inputs_of_rank(rank: int, columns: int) -> torch.Tensor:
    """Second moments of inputs that lie near a plane, as those of real layers do."""
    x = torch.randn(4 * columns, rank) @ torch.randn(rank, columns) + 0.1 * torch.randn(4 * columns, columns)
    h = x.T @ x
    h.diagonal().add_(0.05 * h.diagonal().mean())
    return h


def value(codes, scale, zero):
    group = codes.shape[1] // scale.shape[1]
    grouped = codes.unflatten(1, (-1, group)).float()
    return ((grouped - zero.float()[..., None]) * scale.float()[..., None]).flatten(1)


def output_error(weight, blocks, *twin):
    missed = (weight - value(*twin)).unflatten(1, blocks.shape[:2]).transpose(0, 1)
    return (missed @ blocks * missed).sum((0, 2))  # of each row


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize(("columns", "block", "group"), [(128, 128, 64), (192, 64, 32), (160, 160, 32)])
def test_the_output_error_falls_in_every_row_and_by_half_in_all(bits, columns, block, group):
    weight = torch.randn(40, columns) * 0.02
    blocks = torch.stack([inputs_of_rank(block // 4, block) for _ in range(columns // block)])
    before = clip.quantize(weight, bits, group)
    after = refine(weight, *before, bits, blocks)
    assert after[0].dtype == torch.uint8 and after[0].max() < 2**bits
    assert after[1].dtype == after[2].dtype == torch.float16
    old, new = output_error(weight, blocks, *before), output_error(weight, blocks, *after)
    assert (new <= old * (1 + 1e-4)).all()
    assert new.sum() < 0.5 * old.sum()


def test_error_feedback_is_the_published_recursion():
    """Column by column without blocks of columns: quantize, spread the error by the rows of the inverse's Cholesky factor."""
    columns, group = 2 * STEP + 16, 16
    weight, h = torch.randn(8, columns), inputs_of_rank(20, columns)
    _, scale, zero = clip.quantize(weight, 2, group)
    order = h.diagonal().argsort(descending=True, stable=True)
    inverse = torch.linalg.inv(h[order][:, order].double())
    upper = torch.linalg.cholesky(inverse, upper=True)
    w, s, z = (
        part[:, order].double()
        for part in (weight, scale.repeat_interleave(group, 1), zero.repeat_interleave(group, 1))
    )
    expected = torch.zeros_like(w)
    for k in range(columns):
        expected[:, k] = (w[:, k] / s[:, k] + z[:, k]).round().clamp(0, 3)
        error = (w[:, k] - (expected[:, k] - z[:, k]) * s[:, k]) / upper[k, k]
        w[:, k + 1 :] -= error[:, None] * upper[k, k + 1 :]
    block = Block(weight.T.contiguous(), h, 2, group)
    found = block.feed_back(order, upper.float(), scale.T, zero.T).T[:, order]
    assert (found == expected).float().mean() > 0.99  # a rounding that is nearly a tie may go either way


def test_descent_ends_where_no_single_code_can_be_bettered():
    group = 16
    weight, h = torch.randn(6, 48), inputs_of_rank(12, 48)
    codes, scale, zero = clip.quantize(weight, 2, group)
    block = Block(weight.T.contiguous(), h, 2, group)
    q = codes.T.float()
    for _ in range(30):
        q = block.descend(q, scale.T, zero.T)
    least = block.error(q, scale.T, zero.T)
    for k in range(48):
        for code in range(4):
            other = q.clone()
            other[k] = code
            assert (block.error(other, scale.T, zero.T) >= least * (1 - 1e-4)).all()


def test_refit_is_least_squares():
    """No nearby scale or zero has a smaller error, but for what rounding to float16 costs."""
    group = 16
    weight, h = torch.randn(6, 48), inputs_of_rank(12, 48)
    codes, scale, zero = clip.quantize(weight, 2, group)
    block = Block(weight.T.contiguous(), h, 2, group)
    s, z = block.refit(codes.T.float(), scale.T, zero.T)
    least = block.error(codes.T.float(), s, z)
    assert (least <= block.error(codes.T.float(), scale.T, zero.T)).all()
    for factor in (0.98, 1.02):
        for part in range(3):
            other_s, other_z = s.float(), z.float()
            other_s[part] *= factor
            assert (block.error(codes.T.float(), other_s, z) >= least * (1 - 1e-3)).all()
            other_z[part] *= factor
            assert (block.error(codes.T.float(), s, other_z) >= least * (1 - 1e-3)).all()


AWKWARD = {
    "zeros": torch.zeros(4, 64),
    "constant": torch.full((4, 64), -0.7),
    "tiny": torch.randn(4, 64) * 1e-11,
    "one outlier": torch.cat([torch.zeros(4, 63), torch.full((4, 1), 5.0)], 1),
    "far from zero": 100 + torch.randn(4, 64) * 1e-3,
}


@pytest.mark.parametrize("name", AWKWARD)
@pytest.mark.parametrize("dead", [False, True])
def test_awkward_groups_stay_finite_and_no_worse(name, dead):
    weight, h = AWKWARD[name], inputs_of_rank(8, 64)
    if dead:  # inputs that never were anything
        h[:32], h[:, :32] = 0, 0
        h.diagonal().add_(0.05 * h.diagonal().mean())
    before = clip.quantize(weight, 2, 16)
    after = refine(weight, *before, 2, h[None])
    assert torch.isfinite(value(*after)).all()
    assert (output_error(weight, h[None], *after) <= output_error(weight, h[None], *before) * (1 + 1e-3) + 1e-30).all()


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([8, 32]), st.integers(1, 5))
def test_rows_do_not_depend_on_each_other(seed, group, rows):
    torch.manual_seed(seed)
    weight, h = torch.randn(rows, 64), inputs_of_rank(16, 64)
    before = clip.quantize(weight, 2, group)
    together = refine(weight, *before, 2, h[None])
    for i in range(rows):
        alone = refine(weight[i : i + 1], *(part[i : i + 1] for part in before), 2, h[None])
        whole, single = output_error(weight, h[None], *together)[i], output_error(weight[i : i + 1], h[None], *alone)[0]
        assert single.item() == pytest.approx(whole.item(), rel=0.05)


def test_importance_moves_the_error_to_where_the_inputs_are_small():
    weight = torch.randn(64, 128)
    diagonal = torch.where(torch.arange(128) % 2 == 0, 100.0, 1.0)
    moments = MatrixMoments(torch.diag(diagonal)[None], 1000)
    plain, weighted = (clip.quantize(weight, 2, 64, m) for m in (None, moments))

    def error(twin):
        return ((weight - value(*twin)).square() * diagonal).sum().item()

    assert error(weighted) < 0.9 * error(plain)
    uniform = clip.quantize(weight, 2, 64, MatrixMoments(torch.eye(128)[None], 1000))
    assert (uniform[0] == plain[0]).float().mean() > 0.999


def test_too_few_tokens_leave_it_at_clip():
    weight, h = torch.randn(8, 64), inputs_of_rank(16, 64)[None]
    enough, few = MatrixMoments(h, 64), MatrixMoments(h, 63)
    assert feeds_back(enough, 16) and not feeds_back(few, 16) and not feeds_back(None, 16)
    assert not feeds_back(MatrixMoments(h.diagonal(dim1=1, dim2=2).view(64, 1, 1), 1000), 16)
    for found, expected in zip(gptq.quantize(weight, 2, 16, few), clip.quantize(weight, 2, 16, few), strict=True):
        assert torch.equal(found, expected)
    fields = encode(weight, MatrixFormat("int2", 16), "gptq", enough)
    assert not torch.equal(fields["codes0"], encode(weight, MatrixFormat("int2", 16), "clip", enough)["codes0"])
