"""A model's own configuration against the structure of its graph: it must say the same."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.export.decoder.probing import fitted_base, frequencies
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


@dataclass(frozen=True, kw_only=True)
class ConfigFacts:
    """What only a configuration says, or says exactly. Without one: what the graph tells."""

    architecture: str
    activation: str | None = None
    max_positions: int | None = None
    rotary_base: float
    rotary_scaling: dict[str, Any] | None
    norms_in_parallel: int | None


def config_facts(decoder: Decoder, architectures: tuple[str, ...], config: Any) -> ConfigFacts:
    """Check `config`, a Hugging Face configuration or None, and take what it adds.

    architectures: the names the graph could have. Raises ExportError where the configuration and
    the graph differ, naming both values.
    """
    base, scaling = _rotary(decoder, config)
    if config is None:
        two = decoder.layers[0].mlp_norm is not decoder.layers[0].attention_norm
        return ConfigFacts(
            architecture=architectures[0],
            rotary_base=base,
            rotary_scaling=scaling,
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
    known = [name for name in names if name in architectures]
    if names and not known:
        raise export_error(
            f"the configuration says architecture {names[0]}, the graph is that of "
            f"{' or '.join(architectures)}"
        )
    return ConfigFacts(
        architecture=known[0] if known else _by_type(config, architectures),
        activation=_get(config, "hidden_act", "activation_function", "activation"),
        max_positions=_get(config, "max_position_embeddings", "n_positions"),
        rotary_base=base,
        rotary_scaling=scaling,
        norms_in_parallel=_get(config, "num_ln_in_parallel_attn"),
    )


def _facts(decoder: Decoder, config: Any) -> Iterator[tuple[str, Any, Any]]:
    """(name, what the configuration says, what the graph has) of all that both know."""
    layer = decoder.layers[0]
    attention, mlp = layer.attention, layer.mlp
    graph: dict[tuple[str, ...], Any] = {
        ("vocab_size",): decoder.vocab,
        ("hidden_size", "n_embd"): decoder.hidden,
        ("num_hidden_layers", "n_layer"): len(decoder.layers),
        ("num_attention_heads", "n_head"): attention.heads,
        ("intermediate_size", "n_inner", "ffn_hidden_size"): mlp.width,
        ("head_dim",): attention.head_dim,
        ("rms_norm_eps", "layer_norm_epsilon"): decoder.norm.eps,
        ("tie_word_embeddings",): decoder.tied,
    }
    if mlp.experts:
        graph[("num_local_experts",)] = mlp.experts
        graph[("num_experts_per_tok",)] = mlp.top_k
    if decoder.max_positions is not None:
        graph[("n_positions", "max_position_embeddings")] = decoder.max_positions
    for names, found in graph.items():
        said = _get(config, *names)
        if said is not None:
            yield names[0], said, found
    kv_heads = _kv_heads(config)
    if kv_heads is not None:
        yield "num_key_value_heads", kv_heads, attention.kv_heads
    act = _get(config, "hidden_act", "activation_function", "activation")
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


def _rotary(decoder: Decoder, config: Any) -> tuple[float, dict[str, Any] | None]:
    """(base, scaling); a configuration's where the graph's frequencies are those it describes."""
    for layer in decoder.layers[1:]:
        first, other = decoder.layers[0].attention.rotary, layer.attention.rotary
        if first is not None and other is not None and not torch.allclose(first, other):
            raise export_error("this layer's rotary embedding differs", layer.attention.node)
    attention = decoder.layers[0].attention
    found = attention.rotary
    if found is None:
        return 10000.0, None
    base, scaling = _rope_parameters(config)
    tolerance = max(1e-4, attention.precision)
    if base is None:
        if attention.precision > 1e-4:
            raise export_error(
                f"rotary frequencies are known to {attention.precision:.1g} only, and no "
                "configuration says their base",
                attention.node,
                "Keep the buffer of frequencies in float32.",
            )
        base = fitted_base(found, attention.head_dim)
    expected = frequencies(base, attention.head_dim, scaling)
    if not torch.allclose(found, expected, rtol=tolerance, atol=0):
        worst = int(((found - expected).abs() / expected).argmax())
        raise export_error(
            f"rotary base {base:g} and scaling {scaling} give frequency {expected[worst]:.6g} in "
            f"place {worst}, the graph has {found[worst]:.6g}",
            attention.node,
        )
    return base, scaling


def _rope_parameters(config: Any) -> tuple[float | None, dict[str, Any] | None]:
    """rope_theta and scaling, as transformers 4 or 5 keeps them."""
    both = _get(config, "rope_parameters") or _get(config, "rope_scaling")
    scaling = dict(both) if both else {}
    base = scaling.pop("rope_theta", None) or _get(config, "rope_theta")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    scaling = {key: value for key, value in scaling.items() if value is not None}
    return None if base is None else float(base), None if kind == "default" else scaling


def _by_type(config: Any, architectures: tuple[str, ...]) -> str:
    """The architecture whose name begins like the configuration's class; else the first."""
    kind = type(config).__name__.removesuffix("Config").lower()
    return next((name for name in architectures if name.lower().startswith(kind)), architectures[0])


def _get(config: Any, *names: str) -> Any:
    """The first of these attributes that is there and not None."""
    return next((v for n in names if (v := getattr(config, n, None)) is not None), None)
