"""What the quantizer writes."""

import json
import shutil

import pytest
import torch
from conftest import quantize
from folders import contents
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from apex_engine.checkpoint.atomic import sha256_of
from apex_engine.checkpoint.expert_file import data_offset
from apex_engine.checkpoint.manifest import MANIFEST, Manifest, guard_name
from apex_engine.kernels.layout import ALIGN
from apex_engine.quantize import dense
from models import make_model, save_model


def test_the_dense_part_is_bit_equal(source, finished):
    before, after = load_file(source / "model.safetensors"), load_file(finished / "model.safetensors")
    guard = guard_name("model.layers.0.mlp.experts")
    assert set(after) == {*(name for name in before if ".experts." not in name), guard} and len(after) > 1
    for name, tensor in after.items():
        if name == guard:
            continue
        assert tensor.dtype == before[name].dtype
        assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8)), name


def test_a_float32_router_bias_stays_float32(tmp_path):
    """Correction terms decide the choice of experts: in bfloat16, 12 and 12.02 would be one number."""
    folder = save_model(tmp_path / "source", "deepseek_v3")
    tensors = load_file(folder / "model.safetensors")
    (name,) = (name for name in tensors if "e_score_correction_bias" in name)
    tensors[name] = 12 + 0.02 * torch.arange(8, dtype=torch.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    quantize(folder, tmp_path / "apex")
    kept = load_file(tmp_path / "apex" / "model.safetensors")[name]
    assert kept.dtype == torch.float32 and torch.equal(kept, tensors[name])


def test_expert_files_are_safetensors_and_aligned(finished):
    manifest = Manifest.read(finished)
    for layer in manifest.layers:
        for name, twin in zip(layer.files, manifest.twins, strict=True):
            layout = twin.layout
            with safe_open(finished / name, "pt") as file:
                tensor = file.get_tensor("experts")
            assert tensor.shape == (manifest.experts, layout.stride) and tensor.dtype == torch.uint8
            offset = data_offset(finished / name, layout, manifest.experts)
            assert offset % ALIGN == 0
            assert (finished / name).read_bytes()[offset : offset + layout.stride] == tensor[0].numpy().tobytes()


def test_the_manifest_describes_every_file(finished):
    manifest = Manifest.read(finished)
    assert {*manifest.files, MANIFEST} == set(contents(finished))
    for name, entry in manifest.files.items():
        assert entry.nbytes == (finished / name).stat().st_size and entry.sha256 == sha256_of(finished / name)


def test_high_twins_are_the_source_weights(source, finished):
    manifest, tensors = Manifest.read(finished), load_file(source / "model.safetensors")
    with safe_open(finished / manifest.layers[2].files[-1], "pt") as file:
        views = manifest.twins[-1].layout.views(file.get_tensor("experts")[4])
    prefix = "model.layers.2.block_sparse_moe.experts.4"
    up = torch.cat([tensors[f"{prefix}.w1.weight"], tensors[f"{prefix}.w3.weight"]])
    assert torch.equal(views["up.weight"], up) and torch.equal(views["down.weight"], tensors[f"{prefix}.w2.weight"])


def test_several_dense_files_and_their_index(source, tmp_path, monkeypatch):
    monkeypatch.setattr(dense, "DENSE_SHARD", 50_000)
    quantize(source, tmp_path / "apex")
    index = json.loads((tmp_path / "apex" / "model.safetensors.index.json").read_text())
    shards = set(index["weight_map"].values())
    assert len(shards) > 1
    merged = {name: t for shard in shards for name, t in load_file(tmp_path / "apex" / shard).items()}
    assert set(merged) == set(index["weight_map"])


def test_small_files_are_copied_and_weights_and_code_are_not(source, tmp_path):
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


def test_the_config_says_what_the_twins_are(finished):
    config = json.loads((finished / "config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "apex",
        "version": 2,
        "high": "bfloat16",
        "low": {"up": "int2", "down": "int2"},
        "group_size": 64,
    }


def test_a_dead_expert_of_zeros(tmp_path):
    model = make_model("mixtral", torch.bfloat16)
    experts = model.model.layers[1].mlp.experts
    experts.gate_up_proj.data[2] = 0
    experts.down_proj.data[2] = 0
    model.save_pretrained(tmp_path / "source")
    manifest = quantize(tmp_path / "source", tmp_path / "apex")
    assert 0 < manifest.errors["int2.down"]["error"] < 0.4
    text = (tmp_path / "apex" / MANIFEST).read_text()
    assert "NaN" not in text and "Infinity" not in text


@pytest.mark.parametrize(("high", "low_down"), [("int8", 3), ("float16", 4)])
def test_other_formats_have_their_real_bytes(source, tmp_path, high, low_down):
    manifest = quantize(source, tmp_path / "apex", high=high, low_down=low_down)
    low = manifest.twins[0]
    assert (manifest.twins[-1].layout.up.name, low.layout.down.name) == (high, f"int{low_down}")
    assert manifest.errors[f"{high}.up"]["error"] < 0.01
    assert manifest.errors[f"{low.name}.down"]["error"] < manifest.errors[f"{low.name}.up"]["error"]
    for layer in manifest.layers:
        assert (tmp_path / "apex" / layer.files[0]).stat().st_size == ALIGN + manifest.experts * low.layout.stride
