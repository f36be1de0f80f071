"""The quantizer's life: kills, reruns, full disks, mixed targets."""

import fcntl
import json
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from conftest import quantize
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from apex_engine.checkpoint.atomic import sha256_of
from apex_engine.checkpoint.expert_file import data_offset
from apex_engine.checkpoint.manifest import MANIFEST, Manifest, guard_name, verify
from apex_engine.errors import ApexError
from apex_engine.kernels.layout import ALIGN
from apex_engine.quantize import convert as convert_module
from apex_engine.quantize.convert import JOURNAL, Options, convert
from apex_engine.quantize.source import Source
from models import make_model, save_model


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("mixtral") / "source", num_hidden_layers=3)


@pytest.fixture(scope="module")
def finished(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "apex"
    quantize(source, folder)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


class TestWhatIsWritten:
    def test_the_dense_part_is_bit_equal(self, source, finished):
        before, after = load_file(source / "model.safetensors"), load_file(finished / "model.safetensors")
        guard = guard_name("model.layers.0.mlp.experts")
        assert set(after) == {*(name for name in before if ".experts." not in name), guard} and len(after) > 1
        for name, tensor in after.items():
            if name == guard:
                continue
            assert tensor.dtype == before[name].dtype
            assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8)), name

    def test_a_float32_router_bias_stays_float32(self, tmp_path):
        """Correction terms decide the choice of experts: in bfloat16, 12 and 12.02 would be one number."""
        folder = save_model(tmp_path / "source", "deepseek_v3")
        tensors = load_file(folder / "model.safetensors")
        (name,) = (name for name in tensors if "e_score_correction_bias" in name)
        tensors[name] = 12 + 0.02 * torch.arange(8, dtype=torch.float32)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        quantize(folder, tmp_path / "apex")
        kept = load_file(tmp_path / "apex" / "model.safetensors")[name]
        assert kept.dtype == torch.float32 and torch.equal(kept, tensors[name])

    def test_expert_files_are_safetensors_and_aligned(self, finished):
        manifest = Manifest.read(finished)
        for layer in manifest.layers:
            for name, layout in ((layer.files[-1], manifest.high), (layer.files[0], manifest.low)):
                with safe_open(finished / name, "pt") as file:
                    tensor = file.get_tensor("experts")
                assert tensor.shape == (manifest.experts, layout.stride) and tensor.dtype == torch.uint8
                offset = data_offset(finished / name, layout, manifest.experts)
                assert offset % ALIGN == 0
                assert (finished / name).read_bytes()[offset : offset + layout.stride] == tensor[0].numpy().tobytes()

    def test_the_manifest_describes_every_file(self, finished):
        manifest = Manifest.read(finished)
        assert {*manifest.files, MANIFEST} == set(contents(finished))
        for name, entry in manifest.files.items():
            assert entry.nbytes == (finished / name).stat().st_size and entry.sha256 == sha256_of(finished / name)

    def test_high_twins_are_the_source_weights(self, source, finished):
        manifest, tensors = Manifest.read(finished), load_file(source / "model.safetensors")
        with safe_open(finished / manifest.layers[2].files[-1], "pt") as file:
            views = manifest.high.views(file.get_tensor("experts")[4])
        prefix = "model.layers.2.block_sparse_moe.experts.4"
        up = torch.cat([tensors[f"{prefix}.w1.weight"], tensors[f"{prefix}.w3.weight"]])
        assert torch.equal(views["up.weight"], up) and torch.equal(views["down.weight"], tensors[f"{prefix}.w2.weight"])

    def test_several_dense_files_and_their_index(self, source, tmp_path, monkeypatch):
        monkeypatch.setattr(convert_module, "DENSE_SHARD", 50_000)
        quantize(source, tmp_path / "apex")
        index = json.loads((tmp_path / "apex" / "model.safetensors.index.json").read_text())
        shards = set(index["weight_map"].values())
        assert len(shards) > 1
        merged = {name: t for shard in shards for name, t in load_file(tmp_path / "apex" / shard).items()}
        assert set(merged) == set(index["weight_map"])

    def test_small_files_are_copied_and_weights_and_code_are_not(self, source, tmp_path):
        kept = ["chat_template.jinja", "tokenizer.json", "LICENSE", "additional_chat_templates/tool_use.jinja"]
        dropped = ["pytorch_model.bin", "model.py", "README.md"]
        shutil.copytree(source, tmp_path / "source")
        (tmp_path / "source" / "additional_chat_templates").mkdir()
        for name in kept + dropped:
            (tmp_path / "source" / name).write_text("{}")
        quantize(tmp_path / "source", tmp_path / "apex")
        found = contents(tmp_path / "apex")
        assert all(found[name] == b"{}" for name in kept) and "generation_config.json" in found
        assert not {"pytorch_model.bin", "model.py"} & set(found)
        assert b"import apex_engine" in found["README.md"]

    def test_the_config_says_what_the_twins_are(self, finished):
        config = json.loads((finished / "config.json").read_text())
        assert config["quantization_config"] == {
            "quant_method": "apex",
            "version": 2,
            "high": "bfloat16",
            "low": {"up": "int2", "down": "int2"},
            "group_size": 64,
        }

    def test_transformers_alone_refuses_it(self, finished):
        """Where apex_engine is not imported, the experts would be random numbers, with a warning."""
        script = f"from transformers import AutoModelForCausalLM as M; M.from_pretrained({str(finished)!r})"
        failed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        assert failed.returncode == 1 and "experts.down_proj" in failed.stderr and "MISMATCH" in failed.stderr

    def test_verify(self, finished, tmp_path):
        shutil.copytree(finished, tmp_path / "apex")
        read = []
        verify(tmp_path / "apex", read.append)
        assert set(read) == set(Manifest.read(finished).files)
        content = bytearray((tmp_path / "apex" / "model.safetensors").read_bytes())
        content[-5] ^= 1
        (tmp_path / "apex" / "model.safetensors").write_bytes(content)
        with pytest.raises(ApexError, match=r"model.safetensors is not as it was written"):
            verify(tmp_path / "apex", read.append)

    def test_a_card_may_be_edited(self, finished, tmp_path):
        shutil.copytree(finished, tmp_path / "apex")
        (tmp_path / "apex" / "README.md").write_text("mine")
        assert Manifest.read(tmp_path / "apex").experts == 6

    def test_a_dead_expert_of_zeros(self, tmp_path):
        model = make_model("mixtral", torch.bfloat16)
        experts = model.model.layers[1].mlp.experts
        experts.gate_up_proj.data[2] = 0
        experts.down_proj.data[2] = 0
        model.save_pretrained(tmp_path / "source")
        manifest = quantize(tmp_path / "source", tmp_path / "apex")
        assert 0 < manifest.errors["low.down"]["error"] < 0.4
        text = (tmp_path / "apex" / MANIFEST).read_text()
        assert "NaN" not in text and "Infinity" not in text

    @pytest.mark.parametrize(("high", "low_down"), [("int8", 3), ("float16", 4)])
    def test_other_formats_have_their_real_bytes(self, source, tmp_path, high, low_down):
        manifest = quantize(source, tmp_path / "apex", high=high, low_down=low_down)
        assert (manifest.high.up.name, manifest.low.down.name) == (high, f"int{low_down}")
        assert manifest.errors["high.up"]["error"] < 0.01
        assert manifest.errors["low.down"]["error"] < manifest.errors["low.up"]["error"]
        for layer in manifest.layers:
            assert (tmp_path / "apex" / layer.files[0]).stat().st_size == ALIGN + manifest.experts * manifest.low.stride


class TestReruns:
    def test_a_finished_checkpoint_is_left_alone(self, source, finished):
        before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
        _, done = convert("x", Source(source), finished, Options(), lambda n: None)
        assert not done
        assert before == {path: path.stat().st_mtime_ns for path in finished.rglob("*")}

    def test_other_options_refuse_to_mix(self, source, finished):
        with pytest.raises(ApexError, match="low_method clip -> hqq"):
            quantize(source, finished, low_method="hqq")

    def test_another_model_refuses_to_mix(self, finished, tmp_path):
        other = save_model(tmp_path / "other", seed=1, num_hidden_layers=3)
        with pytest.raises(ApexError, match="twins of another model"):
            quantize(other, finished)

    def test_a_folder_of_something_else_is_refused(self, source, tmp_path):
        (tmp_path / "thesis.tex").touch()
        with pytest.raises(ApexError, match="not empty"):
            quantize(source, tmp_path)
        with pytest.raises(ApexError, match="is a file"):
            quantize(source, tmp_path / "thesis.tex")

    def test_five_runs_are_equal(self, source, finished, tmp_path):
        for run in range(4):
            quantize(source, tmp_path / str(run))
            assert contents(tmp_path / str(run)) == contents(finished)

    @pytest.mark.parametrize("steps", range(5))
    def test_a_run_stopped_after_any_step_resumes_to_the_same_bytes(
        self, source, finished, tmp_path, steps, monkeypatch
    ):
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

    def test_killed_between_the_manifest_and_the_end(self, source, finished, tmp_path, monkeypatch):
        monkeypatch.setattr(convert_module._Journal, "remove", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            quantize(source, tmp_path / "apex")
        monkeypatch.undo()
        assert (tmp_path / "apex" / JOURNAL).exists() and (tmp_path / "apex" / MANIFEST).exists()
        _, done = convert(source.name, Source(source), tmp_path / "apex", Options(), lambda n: None)
        assert not done
        assert contents(tmp_path / "apex") == contents(finished)

    def test_a_refusal_can_be_followed_by_other_options(self, source, finished, tmp_path):
        for options in ({"low_down": 3}, {}):
            caught = None
            try:
                quantize(source, tmp_path / "apex", **options)
            except ApexError as error:
                caught = error  # a notebook keeps it, and with it the frames
            assert caught is None or options == {}
        assert "low_down 3 -> 2" in str(caught)
        quantize(source, tmp_path / "apex", low_down=3)

    def test_an_unfinished_run_refuses_other_options_and_models(self, source, tmp_path, monkeypatch):
        stopped = _stop_after(2, monkeypatch)
        with pytest.raises(stopped):
            quantize(source, tmp_path / "apex")
        monkeypatch.undo()
        with pytest.raises(ApexError, match="low_down 2 -> 3"):
            quantize(source, tmp_path / "apex", low_down=3)
        other = save_model(tmp_path / "other", seed=1, num_hidden_layers=3)
        with pytest.raises(ApexError, match="another model"):
            quantize(other, tmp_path / "apex")

    def test_leftovers_of_a_kill_are_replaced(self, source, finished, tmp_path, monkeypatch):
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

    def test_sigkill_in_the_middle(self, source, finished, tmp_path):
        script = textwrap.dedent(f"""
            import os, signal
            from pathlib import Path
            from apex_engine.quantize.convert import Options, convert
            from apex_engine.quantize.source import Source
            done = []
            def progress(n):
                done.append(n)
                if len(done) == 9:  # in the middle of the second layer
                    os.kill(os.getpid(), signal.SIGKILL)
            convert("{source.name}", Source(Path("{source}")), Path("{tmp_path / "apex"}"), Options(), progress)
        """)
        killed = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
        assert killed.returncode == -signal.SIGKILL
        assert list((tmp_path / "apex").rglob("*.part"))
        quantize(source, tmp_path / "apex")
        assert contents(tmp_path / "apex") == contents(finished)

    def test_two_runs_at_once(self, source, tmp_path):
        (tmp_path / "apex").mkdir()
        with (tmp_path / "apex" / JOURNAL).open("a") as journal:
            fcntl.flock(journal, fcntl.LOCK_EX)
            with pytest.raises(ApexError, match="another run is writing"):
                quantize(source, tmp_path / "apex")


def _stop_after(steps, monkeypatch):
    class Stopped(Exception):
        pass

    left = [steps]
    add = convert_module._Journal.add

    def counted(self, *args):
        if not left[0]:
            raise Stopped
        left[0] -= 1
        add(self, *args)

    monkeypatch.setattr(convert_module._Journal, "add", counted)
    if steps == 4:
        monkeypatch.setattr(convert_module, "_copy_rest", lambda *args: (_ for _ in ()).throw(Stopped))
    return Stopped


class TestRefusals:
    @pytest.mark.parametrize("group", [-1, 0, 38, 512])
    def test_group_sizes_that_do_not_fit(self, source, tmp_path, group):
        with pytest.raises(ApexError, match=r"group size .* use one of 8, 16, 32, 64"):
            quantize(source, tmp_path / "apex", group_size=group)
        assert not (tmp_path / "apex").exists()

    def test_intermediate_96_names_a_group_size_that_fits(self, tmp_path):
        folder = save_model(tmp_path / "source", intermediate_size=96)
        with pytest.raises(
            ApexError,
            match=r"64 does not divide down \(96 inputs\) of model.layers.0.mlp.experts: use one of 8, 16, 32",
        ):
            quantize(folder, tmp_path / "apex")
        quantize(folder, tmp_path / "apex", group_size=32)

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_not_finite_weights_are_named(self, tmp_path, value):
        model = make_model("mixtral", torch.bfloat16)
        model.model.layers[1].mlp.experts.down_proj.data[3, 5, 7] = value
        model.save_pretrained(tmp_path / "source")
        with pytest.raises(
            ApexError, match=r"model.layers.1.mlp.experts, expert 3: the down matrix has a NaN or an infinite"
        ):
            quantize(tmp_path / "source", tmp_path / "apex")
        names = set(contents(tmp_path / "apex"))
        assert MANIFEST not in names and not [name for name in names if "layer-001" in name]

    @pytest.mark.parametrize("where", ["/proc/nothing", "/dev/null/x"])
    def test_places_that_cannot_be_written(self, source, where):
        with pytest.raises(ApexError, match=f"writing to {where} failed"):
            quantize(source, Path(where))

    def test_too_little_disk_is_said_before_anything_is_written(self, source, tmp_path, monkeypatch):
        monkeypatch.setattr(convert_module.shutil, "disk_usage", lambda path: type("", (), {"free": 10_000}))
        with pytest.raises(ApexError, match=r"needs [\d,]+ more bytes, and its disk has 10,000 free"):
            quantize(source, tmp_path / "apex")
        assert not (tmp_path / "apex").exists()

    def test_a_disk_that_fills_up_leaves_nothing_half_written(self, source, finished, tmp_path):
        """The kernel's own limit on a file's size stands for the full disk: writes end with an error in the middle."""
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
            with pytest.raises(ApexError, match="goes on where it stopped"):
                quantize(source, tmp_path / "apex")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, ignored)
        assert not (tmp_path / "apex").exists()
        quantize(source, tmp_path / "apex")
        assert contents(tmp_path / "apex") == contents(finished)

    @pytest.mark.parametrize("options", [{"high": "int4"}, {"low_method": "magic"}, {"low_down": 5}])
    def test_unknown_formats(self, source, tmp_path, options):
        with pytest.raises(ApexError):
            quantize(source, tmp_path / "apex", **options)


def test_manifest_of_an_unfinished_or_spoiled_checkpoint(finished, tmp_path):
    with pytest.raises(ApexError, match="not a finished apex checkpoint"):
        Manifest.read(tmp_path)
    whole = json.loads((finished / MANIFEST).read_text())
    for damage in ({"version": 2}, {**whole, "files": []}, {**whole, "experts": "6"}, [], {**whole, "twins": {}}):
        (tmp_path / MANIFEST).write_text(json.dumps(damage))
        with pytest.raises(ApexError, match="is damaged"):
            Manifest.read(tmp_path)
    (tmp_path / MANIFEST).write_text((finished / MANIFEST).read_text().replace('"version": 2', '"version": 99', 1))
    with pytest.raises(ApexError, match="format version 99"):
        Manifest.read(tmp_path)
    (tmp_path / MANIFEST).write_text((finished / MANIFEST).read_text())
    with pytest.raises(ApexError, match="is missing"):
        Manifest.read(tmp_path)


def test_memory_stays_near_one_expert_whatever_the_models_size(tmp_path):
    """Peak memory of a conversion grows with an expert, not with the number of layers."""
    script = textwrap.dedent("""
        import resource, sys
        from pathlib import Path
        from apex_engine.quantize.convert import Options, convert
        from apex_engine.quantize.source import Source
        source = Source(Path(sys.argv[1]))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        convert("x", source, Path(sys.argv[2]), Options(), lambda n: None)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """)
    grown = {}
    for layers in (2, 8):
        shape = {
            "hidden_size": 256,
            "intermediate_size": 512,
            "head_dim": 64,
            "num_hidden_layers": layers,
            "num_local_experts": 16,
        }
        folder = save_model(tmp_path / f"source{layers}", **shape)
        command = [sys.executable, "-c", script, str(folder), str(tmp_path / f"apex{layers}")]
        grown[layers] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) << 10
    layer = 16 * 3 * 256 * 512 * 2  # bytes of one layer's experts in the source: 12.6 MB
    assert grown[8] - grown[2] < 2 * layer, grown  # six layers more are 75 MB
