"""Free memory in control groups of both versions, on files made by hand."""

import math

import pytest
import torch

from apex_engine.memory.probe import control_groups, free_in, free_memory

MIB = 1 << 20


def group(root, version, path, limit, used, cache, total=None):
    """The files of one control group."""
    folder = root / "sys/fs/cgroup" / ("memory" if version == 1 else "") / path
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
    for name, value in zip(names, (limit, used), strict=True):
        (folder / name).write_text(f"{value}\n")
    prefix = "total_" if version == 1 else ""
    (folder / "memory.stat").write_text(f"anon 5\n{prefix}active_file {cache}\n{prefix}inactive_file {cache}\n")
    return folder


@pytest.mark.parametrize("version", [1, 2])
def test_what_the_page_cache_holds_can_be_had(tmp_path, version):
    folder = group(tmp_path, version, "", 100 * MIB, 90 * MIB, 30 * MIB)
    assert free_in(folder, version == 1) == 70 * MIB


@pytest.mark.parametrize(("version", "none"), [(1, 2**63 - 4096), (2, "max")])
def test_no_limit_is_no_limit(tmp_path, version, none):
    assert free_in(group(tmp_path, version, "", none, 90 * MIB, 0), version == 1) > 1 << 60
    assert free_in(tmp_path / "nothing", False) == math.inf


@pytest.mark.parametrize(("version", "line"), [(1, "5:cpu,memory:/jobs/one"), (2, "0::/jobs/one")])
def test_all_groups_above_count(tmp_path, version, line):
    for path, limit in (("", "1000"), ("jobs", "20"), ("jobs/one", "300")):
        group(tmp_path, version, path, limit, 10, 0)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"9:pids:/\n{line}\n")
    found = control_groups(tmp_path)
    assert [folder.name for folder, _ in found][-2:] == ["jobs", "one"] and {first for _, first in found} == {
        version == 1
    }
    assert min(free_in(*one) for one in found) == 10


def test_a_path_of_the_host_that_is_not_to_be_seen_here(tmp_path):
    group(tmp_path, 1, "", 100, 10, 0)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/docker/abc\n")
    (only,) = control_groups(tmp_path)
    assert free_in(*only) == 90


def test_without_control_groups(tmp_path):
    assert control_groups(tmp_path) == []
    assert 1 << 26 < free_memory(torch.device("cpu")) < 1 << 50
