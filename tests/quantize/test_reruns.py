"""Kills, reruns, mixed targets."""

import fcntl
import json

import pytest
from conftest import quantize
from folders import contents

from apex_engine.checkpoint.manifest import MANIFEST, Manifest
from apex_engine.errors import ApexError
from apex_engine.quantize import convert as convert_module
from apex_engine.quantize.convert import convert
from apex_engine.quantize.journal import JOURNAL, Journal
from apex_engine.quantize.options import Options
from apex_engine.quantize.source.model import Source
from models import save_model


def test_a_finished_checkpoint_is_left_alone(source, finished):
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    _, done = convert("x", Source(source), finished, Options(), lambda n: None)
    assert not done
    assert before == {path: path.stat().st_mtime_ns for path in finished.rglob("*")}


def test_other_options_refuse_to_mix(source, finished):
    with pytest.raises(ApexError, match="low_method clip -> hqq"):
        quantize(source, finished, low_method="hqq")


def test_another_model_refuses_to_mix(finished, tmp_path):
    other = save_model(tmp_path / "other", seed=1, num_hidden_layers=3)
    with pytest.raises(ApexError, match="twins of another model"):
        quantize(other, finished)


def test_a_folder_of_something_else_is_refused(source, tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ApexError, match="not empty"):
        quantize(source, tmp_path)
    with pytest.raises(ApexError, match="is a file"):
        quantize(source, tmp_path / "thesis.tex")


def test_runs_are_equal(source, finished, tmp_path):
    for run in range(2):
        quantize(source, tmp_path / str(run))
        assert contents(tmp_path / str(run)) == contents(finished)


@pytest.mark.parametrize("steps", range(5))
def test_a_run_stopped_after_any_step_resumes_to_the_same_bytes(source, finished, tmp_path, steps, monkeypatch):
    """Three layers and one dense file are four steps; after the fourth only the small files are missing."""
    folder = tmp_path / "apex"
    stopped = _stop_after(steps, monkeypatch)
    with pytest.raises(stopped):
        quantize(source, folder)
    monkeypatch.undo()
    assert not (folder / MANIFEST).exists() and not list(folder.rglob("*.part"))
    journal = (folder / JOURNAL).read_text().splitlines()[1:] if steps else []
    recorded = [name for line in journal for name in json.loads(line)["files"]]
    assert len(recorded) == [0, 2, 4, 6, 7][steps]
    before = {name: (folder / name).stat().st_ino for name in recorded}
    done = []
    convert(source.name, Source(source), folder, Options(), done.append)
    assert sum(done) == 18
    assert {name: (folder / name).stat().st_ino for name in recorded} == before, "finished files were written again"
    assert contents(folder) == contents(finished)


def test_killed_between_the_manifest_and_the_end(source, finished, tmp_path, monkeypatch):
    monkeypatch.setattr(Journal, "remove", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        quantize(source, tmp_path / "apex")
    monkeypatch.undo()
    assert (tmp_path / "apex" / JOURNAL).exists() and (tmp_path / "apex" / MANIFEST).exists()
    _, done = convert(source.name, Source(source), tmp_path / "apex", Options(), lambda n: None)
    assert not done
    assert contents(tmp_path / "apex") == contents(finished)


def test_a_refusal_can_be_followed_by_other_options(source, finished, tmp_path):
    for options in ({"low_down": 3}, {}):
        caught = None
        try:
            quantize(source, tmp_path / "apex", **options)
        except ApexError as error:
            caught = error  # a notebook keeps it, and with it the frames
        assert caught is None or options == {}
    assert "low_down 3 -> 2" in str(caught)
    quantize(source, tmp_path / "apex", low_down=3)


def test_an_unfinished_run_refuses_other_options_and_models(source, tmp_path, monkeypatch):
    stopped = _stop_after(2, monkeypatch)
    with pytest.raises(stopped):
        quantize(source, tmp_path / "apex")
    monkeypatch.undo()
    with pytest.raises(ApexError, match="low_down 2 -> 3"):
        quantize(source, tmp_path / "apex", low_down=3)
    other = save_model(tmp_path / "other", seed=1, num_hidden_layers=3)
    with pytest.raises(ApexError, match="another model"):
        quantize(other, tmp_path / "apex")


def test_leftovers_of_a_kill_are_replaced(source, finished, tmp_path, monkeypatch):
    stopped = _stop_after(2, monkeypatch)
    with pytest.raises(stopped):
        quantize(source, tmp_path / "apex")
    monkeypatch.undo()
    folder = tmp_path / "apex"
    manifest = Manifest.read(finished)
    (folder / manifest.layers[0].files[0]).write_bytes(b"")  # finished once, empty now
    (folder / (manifest.layers[2].files[0] + ".part")).write_bytes(b"half")
    with (folder / JOURNAL).open("a") as journal:
        journal.write('{"files": {"experts/lay')  # a line cut by the kill
    quantize(source, folder)
    assert contents(folder) == contents(finished)


def test_two_runs_at_once(source, tmp_path):
    (tmp_path / "apex").mkdir()
    with (tmp_path / "apex" / JOURNAL).open("a") as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        with pytest.raises(ApexError, match="another run is writing"):
            quantize(source, tmp_path / "apex")


def _stop_after(steps, monkeypatch):
    class Stopped(Exception):
        pass

    left = [steps]
    add = Journal.add

    def counted(self, *args):
        if not left[0]:
            raise Stopped
        left[0] -= 1
        add(self, *args)

    monkeypatch.setattr(Journal, "add", counted)
    if steps == 4:
        monkeypatch.setattr(convert_module, "write_rest", lambda *args: (_ for _ in ()).throw(Stopped))
    return Stopped
