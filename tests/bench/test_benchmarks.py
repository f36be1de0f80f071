"""The decode benchmark's synthetic models, on a shape of no size: what it reports is what the engine did."""

import pytest
import torch

from benchmarks import decode
from benchmarks.synthetic import SHAPES, Trace


def test_the_trace_has_the_published_hit_rates():
    shape = SHAPES["olmoe"]
    trace = Trace(shape, 256, 0)
    for rho, published in shape.published_lru.items():
        assert trace.lru_hit_rate(int(rho * shape.chosen)) == pytest.approx(published, abs=0.04)
    right = (trace.expected == trace.chosen).mean()
    assert right == pytest.approx(shape.foreseen, abs=0.02)


@pytest.mark.parametrize("host", ["0", "100%"])
def test_synthetic_runs_are_counted(tmp_path, host):
    steps = ["on-demand", "+ dynamic precision", "+ admission = default", "apex"]
    options = ["--synthetic", "demo", "--host-memory", host, "--repeats", "1", "--prompt", "4", "--tokens", "6"]
    torch.manual_seed(0)
    result = decode.synthetic(tmp_path, decode.parse([*options, "--steps", *steps]))
    runs = result["runs"]
    assert list(runs) == steps
    assert runs["on-demand"]["bytes_a_token"] > runs["+ dynamic precision"]["bytes_a_token"] > 0
    assert runs["on-demand"]["coverage"] == 0 < runs["apex"]["coverage"]
    table = decode.markdown(result)
    assert all(f"| {name} |" in table for name in steps) and "beside apex: x" in table
