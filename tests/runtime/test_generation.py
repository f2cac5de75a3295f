"""Tokens that a sharded model generates with its cache, which stays sharded, beside serial."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch.utils import _pytree as pytree

from autoshard import programs
from autoshard.building import batch_check
from autoshard.planning import Plan
from autoshard.runtime import lazy_gather, lazy_parts
from autoshard.runtime.compat import FakeTensor
from autoshard.runtime.lazy_gather import LazyGather

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

WHISPER = {"vocab_size": 256, "d_model": 64, "encoder_layers": 1, "decoder_layers": 2}
WHISPER |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_mel_bins": 8}
WHISPER |= {"encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_source_positions": 20}
WHISPER |= {"max_target_positions": 64, "begin_suppress_tokens": None, "pad_token_id": 0}
WHISPER |= {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}

#: Name -> class of transformers, the sizes of its config.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", SIZES),
    "qwen3": ("Qwen3ForCausalLM", {**SIZES, "head_dim": 16}),
    "gemma3": ("Gemma3ForCausalLM", {**SIZES, "head_dim": 16, "sliding_window": 8}),
    "mistral": ("MistralForCausalLM", {**SIZES, "head_dim": 16, "sliding_window": None}),
    "mixtral": ("MixtralForCausalLM", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt2": ("GPT2LMHeadModel", {**GPT2, "bos_token_id": 0, "eos_token_id": 255}),
    "t5": ("T5ForConditionalGeneration", {**T5, "decoder_start_token_id": 0}),
    "mamba": ("MambaForCausalLM", MAMBA),
    "whisper": ("WhisperForConditionalGeneration", WHISPER),
}
HOW: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
    "static cache": {"do_sample": False, "cache_implementation": "static"},
    "prompt lookup": {"do_sample": False, "prompt_lookup_num_tokens": 3, "max_new_tokens": 20},
    "penalties": {"do_sample": False, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    "samples": {"do_sample": True, "top_p": 0.9, "num_return_sequences": 2},
    "padded": {"do_sample": False},
}
WHOLE_TABLE = Plan("tp", 2, {"model.embed_tokens.weight": "I"})


#: Sizes that are doubled for four ranks: the smallest for which the plan is that of larger models.
DOUBLED = {"hidden_size", "intermediate_size", "head_dim", "num_key_value_heads", "n_embd"}
DOUBLED |= {"d_model", "d_kv", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"}


def build(name: str, wide: bool = False) -> Any:
    kind, sizes = MODELS[name]
    made = getattr(transformers, kind)
    torch.manual_seed(0)
    if wide:
        sizes = {key: 2 * size if key in DOUBLED else size for key, size in sizes.items()}
    return made(made.config_class(**sizes)).eval()


def asked(name: str) -> dict[str, Any]:
    """The prompt; its second half repeats the first, so that a lookup finds something."""
    generator = torch.Generator().manual_seed(1)
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 40, generator=generator)}
    ids = torch.randint(3, 250, (2, 5), generator=generator)
    return {"input_ids": ids.repeat(1, 2)}


class Generated(NamedTuple):
    """What one way of generating did.

    equal: the tokens are serial's. made: the programs that it added. steps: the collectives of
    each, the prompt's first; in slow tests of the last. trained: `explain` or the memory of one
    speaks of a backward; not asked in slow tests.
    shares: this rank's part of each tensor of the cache. gathers: of whole values that eager code
    read. choices: exchanges of the ranks' likeliest tokens. compared: batches that were.
    """

    equal: bool
    made: int
    steps: list[Counter[str]]
    trained: bool
    shares: list[float]
    gathers: int
    choices: int
    compared: int


def generated(
    name: str,
    hows: Sequence[str],
    ranks: int,
    asked_all: bool,
    wide: bool = False,
    **more: Any,
) -> list[Generated]:
    model = build(name, wide)
    serial = copy.deepcopy(model)
    made = {"mesh": {"tp": ranks}, "inner": "eager", **more}
    model.compile(backend="autoshard", options=made)
    return [_generated(serial, model, name, how, asked_all) for how in hows]


def _generated(serial: Any, model: Any, name: str, how: str, asked_all: bool) -> Generated:
    inputs, before = asked(name), len(programs(model))
    if how == "prompt lookup":  # of one row
        inputs = {key: value[:1] for key, value in inputs.items()}
    if how == "padded":  # the first row is four tokens shorter
        mask = torch.ones_like(inputs["input_ids"])
        mask[0, :4] = 0
        inputs |= {"attention_mask": mask}
    options = {"max_new_tokens": 6, "pad_token_id": 0, "disable_compile": True, **HOW[how]}
    found, read = [], _counted(lazy_parts, "convert")
    chosen = _counted(lazy_gather, "argmax_of_parts")
    compared = _counted(batch_check, "compare_batch")
    with read, chosen, compared:
        for one in (serial, model):
            torch.manual_seed(5)
            found.append(one.generate(**inputs, return_dict_in_generate=True, **options))
    wanted, got = found
    added = programs(model)[before:]
    cache = getattr(got, "past_key_values", None)
    cache = getattr(got, "cache_params", None) if cache is None else cache
    return Generated(
        equal=torch.equal(wanted.sequences, got.sequences),
        made=len(added),
        steps=[
            Counter(each.op for each in one.collectives())
            for one in (added if asked_all else added[-1:])
        ],
        trained=asked_all
        and bool("backward" in added[-1].explain() or added[-1].memory().gradients),
        shares=_shares(cache) if cache is not None and how != "beams" else [],
        gathers=read.calls,
        choices=chosen.calls,
        compared=compared.calls,
    )


class _counted:
    """A function of a module, of which calls with real tensors are counted while it is entered."""

    def __init__(self, module: Any, name: str) -> None:
        self.module, self.name, self.calls = module, name, 0

    def __enter__(self) -> None:
        self.original = getattr(self.module, self.name)

        def count(*args: Any) -> Any:
            self.calls += not isinstance(args[0], FakeTensor)  # what Dynamo traces with
            return self.original(*args)

        setattr(self.module, self.name, count)

    def __exit__(self, *error: object) -> None:
        setattr(self.module, self.name, self.original)


def _shares(cache: Any) -> list[float]:
    """Of the tensors of a cache with heads or channels: keys, values, states of a recurrence."""
    parts = [
        getattr(cache, name, None) for name in ("self_attention_cache", "cross_attention_cache")
    ]
    layers = [layer for part in parts if part is not None for layer in part.layers]
    held = [value for layer in layers or cache.layers for value in vars(layer).values()]
    tensors = [x for x in pytree.tree_leaves(held) if isinstance(x, torch.Tensor) and x.dim() > 2]
    return [
        x._local.untyped_storage().nbytes() / (x.numel() * x.element_size())
        if isinstance(x, LazyGather)
        else 1.0
        for x in tensors
    ]


def check(
    pool: Any, name: str, hows: Sequence[str], ranks: int = 2, slow: bool = False, **more: Any
) -> list[Generated]:
    results = pool(generated, name, hows, ranks, not slow, pool_timeout=600, **more)
    for rank in results:
        for how, one in zip(hows, rank, strict=True):
            assert one.equal, f"{name}, {how}: other tokens than serial"
            assert not one.trained
            if (
                name == "llama" and how != "prompt lookup" and one.shares
            ):  # two heads of keys: more ranks each hold both
                assert len(one.shares) == 4 and set(one.shares) == {0.5 if ranks == 2 else 1.0}
            for step in one.steps[not slow :]:  # the first is the prompt's
                assert sum(step.values()) < 14, step
    found: list[Generated] = results[0]
    return found


def keeps_its_part(one: Generated, ranks: int) -> None:
    """Of the whole cache, that of cross-attention too; nobody has read it."""
    # a window of seven tokens is a view of the eight that were attended to
    assert one.shares and all(1 <= share * ranks < 1.2 for share in one.shares), one.shares
    assert one.gathers == 0


def test_a_step_has_two_reductions_a_layer(gloo2: Any) -> None:
    """And the gathers of the embedding and of the logits; none of keys and values."""
    (one,) = check(gloo2, "llama", ["greedy"])
    prompt, *steps = one.steps
    assert prompt == steps[0], "a short prompt is a small sum as well"
    assert steps == [Counter(all_reduce=4, all_gather=2)] * 2
    assert one.gathers == one.choices == 0
    assert one.compared == 4, "two calls of a graph, whatever the length of the cache"


@pytest.mark.slow
def test_a_step_of_a_mixture_has_two_reductions_a_layer(gloo2: Any) -> None:
    """Each rank computes the rows of its experts; a layer's router is gathered, a number for each
    expert and token, and nothing travels that the host would wait for."""
    (one,) = check(gloo2, "mixtral", ["greedy"])
    assert one.steps == [Counter(all_reduce=4, all_gather=4)] * 3


def test_a_step_of_two_reductions_a_layer_and_one_small_gather(gloo2: Any) -> None:
    """With a whole table of tokens, and of the logits the likeliest token only."""
    options = {"plan": WHOLE_TABLE, "outputs": "sharded"}
    (one,) = check(gloo2, "llama", ["greedy"], **options)
    assert one.steps[1:] == [Counter(all_reduce=4)] * 2
    assert one.gathers == 0 and one.choices == 6, "one a token"


@pytest.mark.slow
def test_a_cropped_cache_goes_on(gloo2: Any) -> None:
    """Prompt lookup crops what was not accepted, one to three tokens of a step; the crop is a view
    of the parts."""
    (one,) = check(gloo2, "llama", ["prompt lookup"])
    keeps_its_part(one, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt2"])
def test_tokens_are_those_of_serial(gloo2: Any, name: str) -> None:
    dynamic, static, _ = check(gloo2, name, ["sampled", "static cache", "beams"], slow=True)
    assert static.made == 2, "one program a phase"
    keeps_its_part(static, 2)
    assert dynamic.made <= 3


@pytest.mark.slow
def test_what_is_asked_of_generate_beside(gloo2: Any) -> None:
    """Penalties, several samples a prompt, and rows that are padded on their left."""
    check(gloo2, "mistral", ["penalties", "samples", "padded"], slow=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "how"), [("t5", "static cache"), ("mamba", "greedy"), ("whisper", "greedy")]
)
def test_tokens_of_other_kinds_are_those_of_serial(gloo2: Any, name: str, how: str) -> None:
    (one,) = check(gloo2, name, [how], slow=True)
    keeps_its_part(one, 2)


@pytest.mark.slow
def test_more_ranks_than_heads_of_keys(gloo4: Any) -> None:
    check(gloo4, "llama", ["greedy", "static cache", "beams"], 4, slow=True)


#: How each family generates on four ranks, and the collectives of a step: a reduction for each
#: residual branch of its two layers, and those of the embedding and of the logits. Gemma's table of
#: tokens is split by words. GPT-2's packed queries, keys and values become heads by an exchange, as
#: do Mamba's channels and gates; its steps and states are projected by a second reduction a layer.
ON_FOUR: dict[str, tuple[list[str], Counter[str]]] = {
    "qwen3": (["greedy", "static cache"], Counter(all_reduce=4, all_gather=2)),
    "gemma3": (["greedy"], Counter(all_reduce=5, all_gather=2)),
    "gpt2": (["sampled", "static cache"], Counter(all_reduce=5, all_to_all=2, all_gather=1)),
    "t5": (["greedy"], Counter(all_reduce=7, all_gather=1)),
    "mamba": (["greedy"], Counter(all_reduce=5, all_to_all=2, all_gather=1)),
    "whisper": (["greedy"], Counter(all_reduce=7, all_gather=1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_FOUR)
def test_four_ranks_and_a_quarter_of_the_cache_on_each(gloo4: Any, name: str) -> None:
    hows, step = ON_FOUR[name]
    for how, one in zip(hows, check(gloo4, name, hows, 4, slow=True, wide=True), strict=True):
        keeps_its_part(one, 4)
        assert one.steps[-1] == step, (how, one.steps)
