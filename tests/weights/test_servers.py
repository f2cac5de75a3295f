"""Tensors of servers' ranks, beside a separate reading of how vLLM and SGLang load a checkpoint.

What their sources say (vLLM's `layers/linear.py`, `layers/vocab_parallel_embedding.py` and
`layers/fused_moe/layer.py`; SGLang's files of the same names): a loader takes each published
tensor, and narrows it by the rank into the place that a fused parameter has for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from autoshard import weights
from autoshard.errors import AutoshardError
from autoshard.export import QuantizedModel, huggingface
from autoshard.runtime import compat
from autoshard.weights import Sender, ServerTensors
from linked import checked, parts, ranks

SIZES = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {},
    "Qwen2": {},
    "Qwen3": {},
    "Phi3": {},
    "Gemma3": {"tie_word_embeddings": True},
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": EXPERTS,
}


def model_of(family: str, **sizes: int) -> Any:
    text = "TextConfig" if family == "Gemma3" else "Config"
    config = getattr(transformers, f"{family}{text}")(**{**SIZES, **FAMILIES[family], **sizes})
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for parameter in model.parameters():  # norms and biases too
        torch.nn.init.normal_(parameter)
    return model


def loaded(
    model: Any, rank: int, tp: int, published: dict[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """A server's parameters after it has loaded the published checkpoint."""
    if published is None:
        published = compat.published(model, dict(model.state_dict()))
    heads, kv, width = 4, 2, model.config.head_dim
    kv_here, copies = (1, tp // kv) if tp >= kv else (kv // tp, 1)
    q_rows, kv_rows = heads // tp * width, kv_here * width
    made: dict[str, torch.Tensor] = {}

    def put(name: str, shape: tuple[int, ...], at: Any, value: torch.Tensor) -> None:
        made.setdefault(name, torch.zeros(shape, dtype=value.dtype))[at].copy_(value)

    def qkv(name: str, kind: str, value: torch.Tensor) -> None:
        # scales of blocks: offsets and sizes are divided by the block's rows
        block = 128 if name.endswith("scale_inv") else 1
        size = (q_rows if kind == "q" else kv_rows) // block
        shard = rank if kind == "q" else rank // copies
        offset = {"q": 0, "k": q_rows, "v": q_rows + kv_rows}[kind] // block
        shape = ((q_rows + 2 * kv_rows) // block, *value.shape[1:])
        part = value.narrow(0, shard * size, size)
        put(name, shape, slice(offset, offset + size), part)

    def half(name: str, number: int, value: torch.Tensor) -> None:
        size = value.shape[0] // tp
        shape = (2 * size, *value.shape[1:])
        part = value.narrow(0, rank * size, size)
        put(name, shape, slice(number * size, (number + 1) * size), part)

    for name, value in published.items():
        *path, layer, leaf = name.split(".")
        at = ".".join(path)
        if layer in ("q_proj", "k_proj", "v_proj"):
            qkv(f"{at}.qkv_proj.{leaf}", layer[0], value)
        elif layer == "qkv_proj":
            for kind, part in zip("qkv", value.split([heads * width, kv * width, kv * width])):
                qkv(name, kind, part)
        elif layer in ("w1", "w2", "w3") or "experts" in path:
            at, expert = ".".join(path[:-1]), int(path[-1])
            kind = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}.get(layer, layer)
            if kind == "w2":
                size = value.shape[1] // tp
                part = value.narrow(1, rank * size, size)
                put(f"{at}.w2_weight", (4, *part.shape), expert, part)
            else:
                size = value.shape[0] // tp
                rows = slice(0, size) if kind == "w1" else slice(size, 2 * size)
                shape = (4, 2 * size, value.shape[1])
                put(f"{at}.w13_weight", shape, (expert, rows), value.narrow(0, rank * size, size))
        elif layer in ("gate_proj", "up_proj"):
            half(f"{at}.gate_up_proj.{leaf}", int(layer == "up_proj"), value)
        elif layer == "gate_up_proj":
            for number, part in enumerate(value.chunk(2)):
                half(name, number, part)
        elif layer in ("o_proj", "down_proj") and value.shape[1] > 1:
            made[name] = value.narrow(1, rank * value.shape[1] // tp, value.shape[1] // tp)
        elif layer in ("embed_tokens", "lm_head"):
            per = (value.shape[0] + 63) // 64 * 64 // tp
            rows = value[rank * per : (rank + 1) * per]
            put(name, (per, value.shape[1]), slice(0, len(rows)), rows)
        else:
            made[name] = value
    return made


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_server_would_have_loaded(family: str, tp: int) -> None:
    """Two ranks that train on dp_shard send; in bfloat16 too, as servers have it."""
    model = model_of(family)
    state = {n: v for n, v in model.state_dict().items() if n in dict(model.named_parameters())}
    dtype = torch.bfloat16 if tp == 2 else torch.float32

    def run(link: Any) -> Any:
        if link.rank < 2:
            held = parts(state, {"dp_shard": "S(0)"}, {"dp_shard": 2}, link.rank)
            return weights.send(Sender(held), link).wait()
        expected = loaded(model, link.rank - 2, tp)
        if family == "Gemma3":
            expected.pop("lm_head.weight", None)  # one tensor with the embedding, there too
        tensors = {name: torch.full_like(v, 7, dtype=dtype) for name, v in expected.items()}
        taker = ServerTensors(tensors, model.config, link.rank - 2, tp)
        report = weights.receive(taker, link).wait()
        for name, value in expected.items():
            assert torch.equal(tensors[name], value.to(dtype)), name
        return report

    reports = checked(ranks(2 + tp, run))
    sizes = {2: sum(v.numel() for v in state.values())}
    if tp == 1:
        assert reports[2].received == 4 * sizes[2]


@pytest.mark.parametrize("kind", ["fp8", "fp8_channel", "int8"])
def test_a_quantized_server_takes_numbers_and_scales(kind: str, tmp_path: Path) -> None:
    """Of queries, keys and values joined, of layers that are cut by columns, on two ranks."""
    pytest.importorskip("compressed_tensors")
    model = model_of("Llama", hidden_size=256, intermediate_size=512, head_dim=128)
    huggingface(model, tmp_path / "hf", dtype="bfloat16", quantize=kind)
    published = load_file(tmp_path / "hf" / "model.safetensors")

    def run(link: Any) -> None:
        if link.rank == 0:
            return weights.send(QuantizedModel(model, kind, dtype="bfloat16"), link).wait()
        expected = loaded(model, link.rank - 1, 2, published)
        tensors = {name: torch.zeros_like(value) for name, value in expected.items()}
        weights.receive(ServerTensors(tensors, model.config, link.rank - 1, 2), link)
        for name, value in expected.items():
            assert torch.equal(tensors[name], value), name
        scale = "weight_scale_inv" if kind == "fp8" else "weight_scale"
        assert len(tensors[f"model.layers.0.self_attn.qkv_proj.{scale}"]) in (4, 512)

    checked(ranks(3, run))


def test_what_does_not_fit_is_told() -> None:
    model = model_of("Llama")
    state = dict(model.state_dict())
    tensors = loaded(model, 0, 2)

    def refused(change: dict[str, torch.Tensor], config: Any, rank: int, tp: int) -> str:
        taker = ServerTensors({**tensors, **change}, config, rank, tp)
        with pytest.raises(AutoshardError) as error:
            weights.transfer(Sender(parts(state, {}, {"tp": 1}, 0)), taker)
        return str(error.value)

    said = refused({}, model.config, 0, 1)
    assert "has the shape" in said and "for rank 0 of tp=1" in said
    said = refused({"model.router.weight": torch.zeros(3)}, model.config, 0, 2)
    assert "model.router.weight of the server is made of model.router.weight" in said
    with pytest.raises(AutoshardError, match="4 attention heads cannot be divided by tp=3"):
        ServerTensors(tensors, model.config, 0, 3)
