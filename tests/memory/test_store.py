import fcntl
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from apex_engine.checkpoint.expert_file import data_offset
from apex_engine.checkpoint.manifest import Manifest
from apex_engine.core.vocabulary import ExpertId
from apex_engine.errors import ApexError
from apex_engine.kernels.layout import ALIGN
from apex_engine.memory.store import ExpertStore

HIGH, LOW = 2, 1


@pytest.fixture
def checkpoint(tiny, tmp_path):
    """A copy for the test to spoil."""
    shutil.copytree(tiny()[1], tmp_path / "apex")
    return tmp_path / "apex"


def open_store(folder: Path) -> ExpertStore:
    return ExpertStore(folder, Manifest.read(folder))


def a_blob(stride: int) -> np.ndarray:
    raw = np.empty(stride + ALIGN, np.uint8)
    start = -raw.ctypes.data % ALIGN
    return raw[start : start + stride]


def read(store: ExpertStore, expert: ExpertId, precision: int, blob: np.ndarray) -> None:
    store.read(expert, precision, blob)
    store.verify(expert, precision, blob)


def test_every_blob_is_read_as_written(checkpoint):
    store, manifest = open_store(checkpoint), Manifest.read(checkpoint)
    for index, layer in enumerate(manifest.layers):
        for precision, name in ((HIGH, layer.files[-1]), (LOW, layer.files[0])):
            with safe_open(checkpoint / name, "np") as file:
                expected = file.get_tensor("experts")
            for expert in range(manifest.experts):
                blob = a_blob(store.layouts()[precision].stride)
                read(store, ExpertId(index, expert), precision, blob)
                assert (blob == expected[expert]).all()


def test_a_flipped_bit_is_caught_with_layer_expert_and_file(checkpoint):
    manifest = Manifest.read(checkpoint)
    path = checkpoint / manifest.layers[1].files[0]
    with path.open("r+b") as file:
        file.seek(data_offset(path, manifest.layout(LOW), manifest.experts) + 3 * manifest.strides[LOW] + 77)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 4]))
    store = open_store(checkpoint)
    blob = a_blob(manifest.strides[LOW])
    read(store, ExpertId(1, 2), LOW, blob)
    with pytest.raises(ApexError) as caught:
        read(store, ExpertId(1, 3), LOW, blob)
    for part in ("layer 1 (model.layers.1.mlp.experts)", "expert 3", "LOW", str(path), "wrong checksum"):
        assert part in str(caught.value)


def test_a_file_cut_after_opening(checkpoint):
    store, manifest = open_store(checkpoint), Manifest.read(checkpoint)
    path = checkpoint / manifest.layers[0].files[-1]
    os.truncate(path, path.stat().st_size - manifest.strides[HIGH] - ALIGN)
    with pytest.raises(ApexError, match=r"expert 5, HIGH twin cannot be read .* the file ends after 0 of"):
        store.read(ExpertId(0, 5), HIGH, a_blob(manifest.strides[HIGH]))
    with pytest.raises(ApexError, match=r"expert 4, HIGH twin .* the file ends after"):
        store.read(ExpertId(0, 4), HIGH, a_blob(manifest.strides[HIGH]))


@pytest.mark.parametrize("damage", ["missing", "short", "header"])
def test_damage_before_opening(checkpoint, damage):
    path = checkpoint / Manifest.read(checkpoint).layers[1].files[-1]
    if damage == "missing":
        path.unlink()
    elif damage == "short":
        os.truncate(path, 100)
    else:
        content = path.read_bytes()
        path.write_bytes(content[:20] + b"#" + content[21:])
    with pytest.raises(ApexError, match=str(path)):
        open_store(checkpoint)


def test_without_direct_io_it_reads_all_the_same_and_says_so(checkpoint, monkeypatch):
    real_open = os.open

    def no_direct(path, flags, *mode):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real_open(path, flags, *mode)

    monkeypatch.setattr(os, "open", no_direct)
    store = open_store(checkpoint)
    assert not store.direct
    blob = a_blob(store.layouts()[LOW].stride)
    read(store, ExpertId(0, 0), LOW, blob)


def test_reads_that_refuse_direct_io_fall_back(checkpoint, monkeypatch):
    store, preadv, direct = open_store(checkpoint), os.preadv, []

    def refusing(fd, buffers, position):
        direct.append(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT != 0)
        if direct[-1]:
            raise OSError(22, "Invalid argument")
        return preadv(fd, buffers, position)

    if not store.direct:
        pytest.skip("this file system has no O_DIRECT")
    monkeypatch.setattr(os, "preadv", refusing)
    blob = a_blob(store.layouts()[LOW].stride)
    for expert in range(2):
        read(store, ExpertId(1, expert), LOW, blob)
    assert direct == [True, False, False] and not store.direct


def test_several_threads_whose_first_reads_are_refused_together_all_read(checkpoint, monkeypatch):
    """One of them switches to buffered reads while the others' direct ones are still to fail."""
    store, preadv = open_store(checkpoint), os.preadv
    if not store.direct:
        pytest.skip("this file system has no O_DIRECT")
    together, errors = threading.Barrier(4), []

    def refusing(fd, buffers, position):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            together.wait(20)
            if threading.current_thread().name != "first":
                switched.wait(20)
            raise OSError(22, "Invalid argument")
        switched.set()
        return preadv(fd, buffers, position)

    def run(expert):
        try:
            read(store, ExpertId(0, expert), LOW, a_blob(store.layouts()[LOW].stride))
        except ApexError as error:
            errors.append(error)

    switched = threading.Event()
    monkeypatch.setattr(os, "preadv", refusing)
    threads = [threading.Thread(target=run, args=(i,), name="first" if i == 0 else None) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors and not store.direct
