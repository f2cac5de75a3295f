"""Hugging Face directories from one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard.export import ExportError
from trtllm_oracle import make


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        loaded = load_file(path)
        assert not found.keys() & loaded.keys()
        found.update(loaded)
    return found


@pytest.mark.parametrize("name", ["llama_tied", "gpt2", "mixtral"])
@pytest.mark.parametrize("limit", [2**30, 5000])
def test_from_pretrained_gives_the_same(name: str, limit: int, tmp_path: Path) -> None:
    import transformers

    model = make(name).eval()
    autoshard.export.huggingface(model, tmp_path / "out", max_shard_bytes=limit)
    loaded, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    auto = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = torch.arange(12).view(2, 6) + 3
    assert torch.equal(loaded.eval()(ids).logits, model(ids).logits)
    assert torch.equal(auto(ids).logits, model(ids).logits)


SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
RANKED = {f"qk_{kind}_head_dim": 8 for kind in ("rope", "nope")} | {"v_head_dim": 8}
CONVERTED: dict[str, tuple[dict[str, Any], str]] = {
    "MixtralForCausalLM": (
        {"num_local_experts": 4},
        "model.layers.1.block_sparse_moe.experts.3.w2.weight",
    ),
    "Qwen3MoeForCausalLM": (
        {"num_experts": 4, **MIXTURE},
        "model.layers.0.mlp.experts.0.gate_proj.weight",
    ),
    "DeepseekV3ForCausalLM": (
        {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8}
        | MIXTURE
        | RANKED,
        "model.layers.1.mlp.experts.2.up_proj.weight",
    ),
    "GPTNeoXForCausalLM": ({}, "embed_out.weight"),
    "ViTForImageClassification": (
        {"image_size": 8, "patch_size": 4},
        "vit.encoder.layer.0.attention.attention.query.weight",
    ),
}


@pytest.mark.parametrize("kind", CONVERTED)
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_names_and_shapes_are_the_published_ones(
    kind: str, dtype: str | None, tmp_path: Path
) -> None:
    import transformers

    sizes, name = CONVERTED[kind]
    made = getattr(transformers, kind)
    torch.manual_seed(0)
    model = made(made.config_class(**SMALL, **sizes))
    autoshard.export.huggingface(model, tmp_path / "out", dtype=dtype, max_shard_bytes=9000)
    found = tensors(tmp_path / "out")
    (model if dtype is None else model.bfloat16()).save_pretrained(tmp_path / "theirs")
    theirs = tensors(tmp_path / "theirs")
    assert name in found and found.keys() == theirs.keys()
    for key, value in theirs.items():
        assert torch.equal(found[key].to(value.dtype), value), key
    loaded, info = made.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for key, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key].to(value.dtype), value), key


LONG = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SCALING = {name: value for name, value in LONG.items() if name != "rope_theta"}
TWO = {
    "full_attention": {"rope_type": "default", "rope_theta": 7e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
}


@pytest.mark.parametrize(
    ("kind", "given", "older"),
    [
        (
            "Llama",
            {"rope_parameters": LONG, "max_position_embeddings": 64},
            {"rope_theta": 5e5, "rope_scaling": SCALING},
        ),
        ("Qwen3Moe", {"num_experts": 4, "rope_theta": 1e6}, {"num_experts": 4, "rope_theta": 1e6}),
        (
            "GPTNeoX",
            {"rotary_pct": 0.5, "rotary_emb_base": 2e4},
            {"rotary_pct": 0.5, "rotary_emb_base": 2e4},
        ),
        (
            "Gemma3Text",
            {"rope_parameters": TWO},
            {"rope_theta": 7e5, "rope_local_base_freq": 3e4},
        ),
    ],
)
def test_older_readers_find_what_they_look_for(
    kind: str, given: dict[str, Any], older: dict[str, Any], tmp_path: Path
) -> None:
    import transformers

    from autoshard.export.published_form import add_older_names

    config = getattr(transformers, f"{kind}Config")(dtype="bfloat16", **given)
    config.save_pretrained(tmp_path)
    add_older_names(tmp_path / "config.json", config.attribute_map)
    said = json.loads((tmp_path / "config.json").read_text())
    assert {name: said[name] for name in older} == older and said["torch_dtype"] == "bfloat16"
    again = type(config).from_pretrained(tmp_path).to_dict()
    for name, value in config.to_dict().items():
        assert again[name] == value, name


def test_files_and_index(tmp_path: Path) -> None:
    model = make("llama_tied")
    autoshard.export.huggingface(model, tmp_path / "out", max_shard_bytes=5000)
    found = tensors(tmp_path / "out")
    wanted = dict(model.named_parameters())  # a tied parameter once, under its first name
    assert found.keys() == wanted.keys() and "lm_head.weight" not in found
    for name, value in wanted.items():
        assert torch.equal(found[name], value)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == wanted.keys()
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in wanted.values())
    for path in (tmp_path / "out").glob("*.safetensors"):
        inside = [n for n, file in index["weight_map"].items() if file == path.name]
        size = sum(wanted[n].nbytes for n in inside)
        assert inside and (size <= 5000 or len(inside) == 1)


def test_plain_module_with_buffers(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(torch.float32)
    autoshard.export.huggingface(model, tmp_path / "out", dtype=torch.bfloat16)
    found = tensors(tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    for name, value in model.state_dict().items():
        floating = name in dict(model.named_parameters())
        assert torch.equal(found[name], value.bfloat16() if floating else value), name


def test_configuration_names_class_and_dtype(tmp_path: Path) -> None:
    model = make("gpt2")
    autoshard.export.huggingface(model, tmp_path / "out", dtype=torch.float16)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["GPT2LMHeadModel"], "float16")
    assert (tmp_path / "out" / "generation_config.json").exists()
    assert model.config.architectures is None  # the model itself is not changed


def test_nothing_is_left_of_a_failure(tmp_path: Path) -> None:
    class Broken:
        def save_pretrained(self, folder: Any) -> None:
            raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        autoshard.export.huggingface(nn.Linear(2, 2), tmp_path / "out", tokenizer=Broken())
    with pytest.raises(ExportError, match="weight is on the meta device"):
        autoshard.export.huggingface(nn.Linear(2, 2, device="meta"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
