"""Tokens that a sharded model generates with its cache, which stays sharded, beside serial."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from torch.utils import _pytree as pytree

from autoshard import programs
from autoshard.runtime.lazy import LazyGather

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
T5 = {"vocab_size": 256, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
GPT2 = {"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
MAMBA = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}

#: Name -> class of transformers, the sizes of its config.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", SIZES),
    "qwen3": ("Qwen3ForCausalLM", {**SIZES, "head_dim": 16}),
    "gemma3": ("Gemma3ForCausalLM", {**SIZES, "head_dim": 16, "sliding_window": 8}),
    "gpt2": ("GPT2LMHeadModel", {**GPT2, "bos_token_id": 0, "eos_token_id": 255}),
    "t5": ("T5ForConditionalGeneration", {**T5, "decoder_start_token_id": 0}),
    "mamba": ("MambaForCausalLM", MAMBA),
}
HOW: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
    "static cache": {"do_sample": False, "cache_implementation": "static"},
}


def build(name: str) -> Any:
    kind, sizes = MODELS[name]
    made = getattr(transformers, kind)
    torch.manual_seed(0)
    return made(made.config_class(**sizes)).eval()


def generated(
    name: str, how: str, ranks: int
) -> tuple[bool, list[Counter[str]], bool, list[float]]:
    """Whether the tokens are serial's; the collectives of each program; whether `explain` or the
    memory of one speaks of a backward; this rank's share of each tensor of the cache."""
    model = build(name)
    serial = copy.deepcopy(model)
    ids = torch.randint(3, 250, (2, 10), generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": 6, "pad_token_id": 0, "disable_compile": True, **HOW[how]}
    found = []
    model.compile(backend="autoshard", options={"mesh": {"tp": ranks}, "inner": "eager"})
    for one in (serial, model):
        torch.manual_seed(5)
        found.append(one.generate(ids, return_dict_in_generate=True, **options))
    wanted, got = found
    made = programs(model)
    trained = any("backward" in one.explain() or one.memory().gradients for one in made)
    cache = getattr(got, "past_key_values", None)
    shares = _shares(cache) if hasattr(cache, "layers") and how != "beams" else []
    counts = [Counter(each.op for each in one.collectives()) for one in made]
    return torch.equal(wanted.sequences, got.sequences), counts, trained, shares


def _shares(cache: Any) -> list[float]:
    held = [value for layer in cache.layers for value in vars(layer).values()]
    tensors = [x for x in pytree.tree_leaves(held) if isinstance(x, torch.Tensor) and x.dim() == 4]
    return [
        x._local.untyped_storage().nbytes() / (x.numel() * x.element_size())
        if isinstance(x, LazyGather)
        else 1.0
        for x in tensors
    ]


def check(pool: Any, name: str, how: str, ranks: int) -> list[Counter[str]]:
    results = pool(generated, name, how, ranks)
    for equal, counts, trained, shares in results:
        assert equal, f"{name}, {how}: other tokens than serial"
        assert not trained
        if name == "llama" and shares:  # two heads of keys: more ranks each hold both
            assert len(shares) == 4 and set(shares) == {0.5 if ranks == 2 else 1.0}
        for step in counts[1:]:  # the first is the prompt's
            assert sum(step.values()) < 14, step
    found: list[Counter[str]] = results[0][1]
    return found


def test_a_step_has_two_reductions_a_layer(gloo2: Any) -> None:
    """And the gathers of the embedding and of the logits; none of keys and values."""
    prompt, *steps = check(gloo2, "llama", "greedy", 2)
    assert sum(prompt.values()) == 10
    assert steps == [Counter(all_reduce=4, all_gather=2)] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("llama", "sampled"),
        ("llama", "beams"),
        ("llama", "static cache"),
        ("qwen3", "greedy"),
        ("gemma3", "static cache"),
        ("gpt2", "beams"),
        ("t5", "greedy"),
        ("mamba", "greedy"),
    ],
)
def test_tokens_are_those_of_serial(gloo2: Any, name: str, how: str) -> None:
    check(gloo2, name, how, 2)


@pytest.mark.slow
def test_more_ranks_than_heads_of_keys(gloo4: Any) -> None:
    check(gloo4, "llama", "greedy", 4)
