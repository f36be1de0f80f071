"""Checkpoints in: what must convert, and what must be refused before anything is written."""

import json
import shutil
import struct

import pytest
import torch
from conftest import quantize
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Mxfp4Config

import apex_engine
from apex_engine.errors import ApexError
from apex_engine.quantize.methods.encode import encode
from apex_engine.quantize.source.model import Source
from apex_engine.quantize.source.names import resolve
from models import make_model, save_model


@pytest.fixture
def source(tmp_path):
    """A tiny Mixtral of its own for the test to spoil, in several shards."""
    make_model("mixtral", torch.bfloat16).save_pretrained(tmp_path / "source", max_shard_size="200KB")
    return tmp_path / "source"


def refused(folder, *parts):
    with pytest.raises(ApexError) as caught:
        Source(folder)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message
    return message


def test_shards_are_found(source):
    assert len(list(source.glob("*.safetensors"))) > 2
    found = Source(source)
    assert [layer.number for layer in found.layers] == [0, 1] and found.layers[0].experts == 6


def test_per_expert_and_stacked_tensors_give_the_same_twins(tmp_path):
    """One model saved with a tensor an expert, as released, and with stacked 3-D experts, as transformers 5 holds them."""
    model = make_model("mixtral", torch.bfloat16)
    model.save_pretrained(tmp_path / "apart")
    shutil.copytree(tmp_path / "apart", tmp_path / "stacked")
    save_file(dict(model.state_dict()), tmp_path / "stacked" / "model.safetensors", metadata={"format": "pt"})
    assert any("experts.0.w1" in key for key in Source(tmp_path / "apart").tensors)
    assert any("experts.gate_up_proj" in key for key in Source(tmp_path / "stacked").tensors)
    apart = quantize(tmp_path / "apart", tmp_path / "1")
    stacked = quantize(tmp_path / "stacked", tmp_path / "2")
    names = [name for layer in apart.layers for name in (layer.files[-1], layer.files[0])]
    assert len(names) == 4
    for name in names:
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()
        assert apart.files[name] == stacked.files[name] and len(apart.files[name].blobs) == 6


def test_whole_layer_and_expert_by_expert_conversion_agree(source, monkeypatch):
    found = Source(source)
    apart = list(found.expert(found.layers[1]))
    assert all(parameter.per_expert for parameter in found.layers[1].parameters.values())
    monkeypatch.setattr(
        "apex_engine.quantize.source.parameters.ExpertParameter.per_expert",
        property(lambda self: self.converter is None),
    )
    whole = list(found.expert(found.layers[1]))
    for a, b in zip(apart, whole, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_mxfp4_experts_are_dequantized_exactly(tmp_path):
    """gpt-oss is released in MXFP4 only: its HIGH twins are the exact bfloat16 values."""
    folder = save_model(tmp_path / "source", "gpt_oss")
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(122, 126, (experts, outputs, inputs // 32), dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))

    quantize(folder, tmp_path / "apex")
    reference = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)
    )
    model = apex_engine.load(tmp_path / "apex", mode="exact", memory="100%")
    ids = torch.randint(2, 128, (1, 12))
    torch.testing.assert_close(model(ids).logits.float(), reference(ids).logits.float(), rtol=0.02, atol=0.07)


class TestRefusals:
    def test_missing_shard(self, source):
        shard = sorted(source.glob("*.safetensors"))[1]
        shard.unlink()
        refused(source, str(shard), "is missing", "complete the download")

    def test_truncated_shard(self, source):
        shard = sorted(source.glob("*.safetensors"))[0]
        shard.write_bytes(shard.read_bytes()[:-100])
        refused(source, str(shard), "damaged or cut short")

    def test_header_offset_past_the_end(self, source):
        shard = sorted(source.glob("*.safetensors"))[0]
        content = shard.read_bytes()
        (size,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + size])
        last = max(
            (name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"][1]
        )
        header[last]["data_offsets"][1] += 1000
        text = json.dumps(header).encode()
        shard.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])
        refused(source, str(shard), "damaged")

    def test_empty_shard(self, source):
        shard = sorted(source.glob("*.safetensors"))[0]
        shard.write_bytes(b"")
        refused(source, str(shard), "damaged")

    def test_renamed_prefix(self, tmp_path):
        folder = save_model(tmp_path / "source")
        tensors = load_file(folder / "model.safetensors")
        renamed = {
            name.replace("block_sparse_moe.experts", "moe.specialists"): tensor for name, tensor in tensors.items()
        }
        save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
        refused(
            folder,
            "missing model.layers.0.mlp.experts.down_proj",
            "unexpected model.layers.0.moe.specialists",
            "Nothing was written",
        )

    def test_an_expert_is_missing(self, tmp_path):
        folder = save_model(tmp_path / "source")
        tensors = load_file(folder / "model.safetensors")
        del tensors["model.layers.1.block_sparse_moe.experts.3.w3.weight"]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        refused(
            folder,
            "model.layers.1.mlp.experts.gate_up_proj",
            "5 of .experts.*.w3.weight",
            "is a shard or an expert missing",
        )

    def test_config_of_another_model(self, tmp_path):
        folder = save_model(tmp_path / "source")
        config = json.loads((folder / "config.json").read_text())
        config["num_local_experts"] = 4
        (folder / "config.json").write_text(json.dumps(config))
        refused(folder, "for each of 4 experts", "config.json from another model")

    def test_config_of_another_width(self, tmp_path):
        folder = save_model(tmp_path / "source")
        config = json.loads((folder / "config.json").read_text())
        config["intermediate_size"] = 64
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(ApexError, match="config asks for"):
            quantize(folder, tmp_path / "apex")

    def test_pickles(self, source):
        for path in source.glob("*safetensors*"):
            path.unlink()
        (source / "pytorch_model.bin").write_bytes(b"")
        refused(source, "pickled weights (pytorch_model.bin)", "safetensors revision")

    def test_no_weights(self, source):
        for path in source.glob("*safetensors*"):
            path.unlink()
        refused(source, "no model.safetensors")

    def test_dense_model(self, tmp_path):
        config = AutoConfig.for_model(
            "llama", hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "dense")
        refused(tmp_path / "dense", "no experts behind transformers' experts interface", "a dense model gains nothing")

    def test_no_config(self, tmp_path):
        refused(tmp_path, "no config.json")

    def test_damaged_config(self, source):
        (source / "config.json").write_text("{")
        refused(source, "config.json is not a model config")

    @pytest.mark.parametrize("weight_map", ["[]", "{}", '{"a": 1}', "3"])
    def test_damaged_index(self, source, weight_map):
        (source / "model.safetensors.index.json").write_text('{"weight_map": ' + weight_map + "}")
        refused(source, "index.json is damaged")

    def test_unknown_activation(self, source):
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps({**config, "hidden_act": "swish2"}))
        refused(source, "no causal language model transformers can build", "swish2")

    def test_a_null_quantization_config_is_none(self, source):
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps({**config, "quantization_config": None}))
        assert Source(source).expert_dtype == "bfloat16"

    def test_a_single_file_takes_precedence_over_an_index_as_in_transformers(self, source, tmp_path):
        single = save_model(tmp_path / "single", seed=1)
        shutil.copy(single / "model.safetensors", source)
        assert {ref.shard.name for ref in Source(source).tensors.values()} == {"model.safetensors"}

    def test_already_quantized(self, source):
        config = json.loads((source / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
        (source / "config.json").write_text(json.dumps(config))
        refused(source, "quantized already (gptq)", "original weights")

    def test_apex_checkpoint_as_source(self, tiny):
        refused(tiny()[1], "apex checkpoint already")

    def test_integer_experts(self, tmp_path):
        folder = save_model(tmp_path / "source")
        tensors = load_file(folder / "model.safetensors")
        tensors = {name: t.to(torch.int8) if "experts" in name else t for name, t in tensors.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ApexError, match="take the unquantized checkpoint"):
            quantize(folder, tmp_path / "apex")

    def test_float32_needs_a_word(self, tmp_path):
        folder = save_model(tmp_path / "source", dtype=torch.float32)
        with pytest.raises(ApexError, match="--high bfloat16 or --high float16"):
            quantize(folder, tmp_path / "apex")
        manifest = quantize(folder, tmp_path / "apex", high="bfloat16")
        low, high = (twin.layout for twin in manifest.twins)
        assert high.up.name == "bfloat16" and 0 < manifest.errors["bfloat16.up"]["error"] < 0.004
        # The LOW twin is made of the float32 weights, not of the rounded or otherwise used ones.
        name = "model.layers.1.block_sparse_moe.experts.5.w2.weight"
        expected = encode(load_file(folder / "model.safetensors")[name], low.down)
        with safe_open(tmp_path / "apex" / manifest.layers[1].files[0], "pt") as file:
            views = low.views(file.get_tensor("experts")[5])
        assert all(torch.equal(views[f"down.{field}"], value) for field, value in expected.items())


class TestResolve:
    def test_a_file(self, tmp_path):
        (tmp_path / "x").touch()
        with pytest.raises(ApexError, match="is a file"):
            resolve(str(tmp_path / "x"))

    @pytest.mark.parametrize("name", ["/nowhere/at/all", "./x", "../a/b", "nothing"])
    def test_nothing(self, name):
        with pytest.raises(ApexError, match="no directory, no hub id"):
            resolve(name)

    def test_a_slip(self):
        with pytest.raises(ApexError, match="did you mean olmoe"):
            resolve("olmo")

    def test_a_directory_with_the_name_of_an_alias(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "mixtral").mkdir()
        with pytest.raises(ApexError, match=r"write ./mixtral or mistralai/"):
            resolve("mixtral")
        assert resolve("./mixtral").is_dir()

    def test_no_network(self, monkeypatch):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(ApexError, match=r"mixtral .alias of mistralai/Mixtral.*the hub could not be reached"):
            resolve("mixtral")
