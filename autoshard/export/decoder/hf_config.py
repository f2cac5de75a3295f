"""A model's own configuration against the structure of its graph: it must say the same."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard.export.decoder.hf_rotary import RotaryFacts, rotary_facts
from autoshard.export.decoder.structure import Decoder
from autoshard.export.errors import export_error

_MEANING = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
"""Hugging Face's names of activations, by the function they name."""

_ACTIVATIONS = ("hidden_activation", "hidden_act", "activation_function", "activation")


@dataclass(frozen=True, kw_only=True)
class ConfigFacts:
    """What only a configuration says, or says exactly. Without one: what the graph tells.

    dense_width: of the MLPs that a mixture of experts has beside it in other sizes. window: of
    layers that see the last tokens only.
    """

    architecture: str
    activation: str | None = None
    max_positions: int | None = None
    rotary: RotaryFacts
    norms_in_parallel: int | None
    dense_width: int | None = None
    window: int | None = None


def config_facts(decoder: Decoder, architectures: tuple[str, ...], config: Any) -> ConfigFacts:
    """Check `config`, a Hugging Face configuration or None, and take what it adds.

    architectures: the names the graph could have. Raises ExportError where the configuration and
    the graph differ, naming both values.
    """
    rotary = rotary_facts(decoder, config)
    if config is None:
        two = decoder.layers[0].mlp_norm is not decoder.layers[0].attention_norm
        return ConfigFacts(
            architecture=architectures[0],
            rotary=rotary,
            norms_in_parallel=2 if two else None,
        )
    for name, said, found in _facts(decoder, config):
        same = math.isclose(said, found, rel_tol=1e-6) if isinstance(said, float) else said == found
        if not same:
            raise export_error(
                f"the configuration says {name} {said}, the graph has {found}",
                remedy="The model was changed after it was built, or the configuration was.",
            )
    names = tuple(getattr(config, "architectures", None) or ())
    if names and not any(name in architectures for name in names):
        raise export_error(
            f"the configuration says architecture {names[0]}, the graph is that of "
            f"{' or '.join(architectures)}",
            remedy="Where TensorRT-LLM has no checkpoints of it, serve a Hugging Face directory.",
        )
    return ConfigFacts(
        architecture=architecture_of(config, architectures) or architectures[0],
        activation=_get(config, *_ACTIVATIONS),
        max_positions=_get(config, "max_position_embeddings", "n_positions", "seq_length"),
        rotary=rotary,
        norms_in_parallel=_get(config, "num_ln_in_parallel_attn"),
        dense_width=_get(config, "intermediate_size"),
        window=_get(config, "sliding_window"),
    )


def architecture_of(config: Any, known: Sequence[str]) -> str | None:
    """The architecture among `known` that a configuration names, itself or by its class."""
    names = getattr(config, "architectures", None) or ()
    kind = type(config).__name__.removesuffix("Config").removesuffix("Text").lower()
    listed = (name for name in names if name in known)
    by_class = (name for name in known if not names and name.lower().startswith(kind + "for"))
    return next(listed, None) or next(by_class, None)


def _facts(decoder: Decoder, config: Any) -> Iterator[tuple[str, Any, Any]]:
    """(name, what the configuration says, what the graph has) of all that both know."""
    layer = decoder.layers[0]
    attention, mlp = layer.attention, layer.mlp
    graph: dict[tuple[str, ...], Any] = {
        ("vocab_size",): decoder.vocab,
        ("hidden_size", "n_embd"): decoder.hidden,
        ("num_hidden_layers", "n_layer"): len(decoder.layers),
        ("num_attention_heads", "n_head"): attention.heads,
        ("head_dim",): attention.head_dim,
        ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon"): decoder.norm.eps,
        ("tie_word_embeddings",): decoder.tied,
        ("final_logit_softcapping",): decoder.softcap,
        ("attn_logit_softcapping",): attention.softcap,
    }
    if mlp.experts:
        graph[("num_local_experts", "num_experts")] = mlp.experts
        graph[("num_experts_per_tok",)] = mlp.top_k
        graph[("moe_intermediate_size", "intermediate_size")] = mlp.width
        graph[("norm_topk_prob",)] = mlp.renormalised
        if mlp.shared is not None:
            graph[("shared_expert_intermediate_size",)] = mlp.shared.width
    else:
        graph[("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim")] = mlp.width
    if decoder.max_positions is not None:
        graph[("n_positions", "max_position_embeddings")] = decoder.max_positions
    for layer in decoder.layers:
        if layer.attention.window is not None:
            graph[("sliding_window",)] = layer.attention.window
    for names, found in graph.items():
        said = _get(config, *names)
        if said is not None:
            yield names[0], said, found
    kv_heads = _kv_heads(config)
    if kv_heads is not None:
        yield "num_key_value_heads", kv_heads, attention.kv_heads
    act = _get(config, *_ACTIVATIONS)
    if act is not None:
        yield f"activation {act}, that is", _MEANING.get(act, act), mlp.activation


def _kv_heads(config: Any) -> int | None:
    if hasattr(config, "new_decoder_architecture"):  # Falcon
        if config.multi_query and not config.new_decoder_architecture:
            return 1
        if not config.new_decoder_architecture:
            return _get(config, "num_attention_heads")  # type: ignore[no-any-return]
        return _get(config, "num_kv_heads")  # type: ignore[no-any-return]
    return _get(config, "num_key_value_heads")  # type: ignore[no-any-return]


def _get(config: Any, *names: str) -> Any:
    """The first of these attributes that is there and not None."""
    return next((v for n in names if (v := getattr(config, n, None)) is not None), None)
