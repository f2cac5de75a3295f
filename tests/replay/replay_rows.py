"""The rows of the replay: a model, and what is made of it, as one line of text each.

    llama tp=2 dp_shard=2 zero=2            the program of rank 0 of a mesh, with fields of Config
    llama pp=2 schedule=zb1                 the stages of a pipeline
    llama world=8 hardware=h100             the meshes that a search tries
    llama engine=64 tp=2                    the graph that an engine is built of, its cache of 64

Beside axes of the mesh and options of Config a row may say `hardware` ("cpu" if absent), `rank` and
`microbatch`. Rows of one model follow each other: they share one trace.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any

from autoshard.runtime.mesh import AXIS_ORDER

QUICK = """
decoder tp=2
decoder tp=4 rank=3
decoder tp=2 chunk_loss=True
decoder cp=2
decoder dp_shard=2
decoder dp_shard=4 zero=auto
decoder dp_shard=2 memory_budget=1400000 host_memory=100000000
decoder dp_shard=2 tp=2 rank=3
decoder cp=2 tp=2
gated tp=2
gated tp=3 rank=2
gated tp=2 outputs=dtensor
gated tp=2 precision={'matmul':'float8'}
gated cp=2
gated dp_shard=2 zero=2 microbatch=accumulate
gated dp_shard=2 precision={'reduce':'bfloat16','accumulate':'float32'}
gated dp_replicate=2 gradient_reduction=sum bucket_bytes=100000
gated dp_replicate=2 dp_shard=2 zero=2 defer_reduction=True
gated dp_replicate=2 tp=2 loss_tokens=global
gated dp_shard=2 cp=2
gated dp_shard=2 zero=1 microbatch=flush
gated dp_replicate=2 dp_shard=2 tp=2
gated dp_shard=2 tp=2 zero=auto
gated pp=2
gated pp=2 schedule=gpipe microbatches=2
gated pp=2 dp_shard=2 zero=auto memory_budget=600000
gated pp=2 cp=2
gated world=8
lowered dp_shard=2 precision={'param':'bfloat16','reduce':'float32'}
checkpointed tp=2 recompute_collectives=all
checkpointed dp_shard=2 recompute_collectives=none
layers pp=2
layers pp=2 schedule=interleaved microbatches=2
layers pp=2 schedule=zb1 tp=2
layers world=8
wide tp=4 hardware=h100
wide tp=4 sequence_parallel=False
wide tp=2 fuse_collectives=True
wide tp=4 memory_budget=12000000
wide world=8 hardware=h100 memory_budget=20000000
routed ep=2
routed ep=2 ep_exchange=rows
routed ep=2 tp=2
routed tp=2
routed dp_shard=2 ep=2
routed cp=2 tp=2
routed pp=2 ep=2
routed world=4
llama_1 tp=2
llama_1 dp_shard=2 rng=tracker
prompt tp=2
prompt dp_shard=2
decoding tp=2
gpt2_dropout_1 tp=2
bert_1 tp=2
t5_1 tp=2
vit_1 tp=2
mamba_1 tp=2
resnet tp=2
llama engine=64 tp=2
"""

_MODELS = (
    "llama llama_gqa llama_uneven llama_tied wide_llama lowered_llama checkpointed_llama gpt2 "
    "gpt2_dropout bert t5 vit mixtral mistral qwen3 gemma3 gpt_neox opt bart roberta clip whisper "
    "resnet mamba mlp twice lstm transformer convnet lora decoder"
).split()
_SEQUENCES = "llama wide_llama llama_gqa gpt2 mistral qwen3 mixtral bert".split()
_EVERYWHERE = """
tp=2
tp=4 rank=1
tp=2 memory_budget=2000000
dp_shard=2
dp_shard=2 zero=1 microbatch=flush
dp_shard=2 zero=2 microbatch=accumulate
dp_shard=2 zero=auto
dp_replicate=2
dp_shard=2 tp=2
"""
_OF_SEQUENCES = """
cp=2
cp=4
cp=2 tp=2
dp_shard=2 cp=2
pp=2
pp=2 schedule=gpipe microbatches=2
pp=2 schedule=zb1 tp=2
pp=2 cp=2
pp=2 dp_shard=2
world=4
"""


def _texts(block: str) -> list[str]:
    return [line.strip() for line in block.splitlines() if line.strip()]


def quick() -> list[str]:
    """The rows whose digests the repository holds."""
    return _texts(QUICK)


def every() -> list[str]:
    """Those and the others, each model's together."""
    found = quick()
    for model in _MODELS:
        found += [f"{model} {each}" for each in _texts(_EVERYWHERE)]
        if model in _SEQUENCES:
            found += [f"{model} {each}" for each in _texts(_OF_SEQUENCES)]
    models = list(dict.fromkeys(row.split()[0] for row in found))
    return sorted(dict.fromkeys(found), key=lambda row: models.index(row.split()[0]))


@dataclass(frozen=True)
class Row:
    """What a line says. world: of a search; engine: the length of an engine's cache; 0: neither."""

    text: str
    model: str
    mesh: dict[str, int] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    hardware: str = "cpu"
    rank: int = 0
    microbatch: str = "single"
    world: int = 0
    engine: int = 0

    @staticmethod
    def of(text: str) -> Row:
        """Read a line."""
        model, *words = text.split()
        pairs = [word.partition("=") for word in words]
        given: dict[str, Any] = {name: _value(value) for name, _, value in pairs}
        mesh = {name: given.pop(name) for name in AXIS_ORDER if name in given}
        own = ("hardware", "rank", "microbatch", "world", "engine")
        named = {name: given.pop(name) for name in own if name in given}
        return Row(text, model, mesh, given, **named)


def _value(word: str) -> Any:
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word  # a name
