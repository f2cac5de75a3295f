"""A model's own configuration, rotary embeddings included, against the structure of its graph: it
must say the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autoshard.export.decoder.structure import Attention, Decoder
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
        numbers = isinstance(said, float) and found is not None
        if not (math.isclose(said, found, rel_tol=1e-6) if numbers else said == found):
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


_PLAIN_BASE = 10000.0


@dataclass(frozen=True, kw_only=True)
class RotaryFacts:
    """base and scaling of the embedding of all layers; local_base: of those that see a window
    only, `local` says which, where they have another."""

    base: float = _PLAIN_BASE
    scaling: dict[str, Any] | None = None
    local_base: float | None = None
    local: tuple[bool, ...] = ()


def rotary_facts(decoder: Decoder, config: Any) -> RotaryFacts:
    """A configuration's, where the graph's frequencies are those it describes; without one, the
    base that the frequencies are powers of. Raises ExportError where they differ."""
    attentions = [layer.attention for layer in decoder.layers]
    if attentions[0].rotary is None:
        return RotaryFacts()
    types = getattr(config, "layer_types", None)
    described = _parameters(config)
    if types and set(types) <= described.keys():
        return _by_type(attentions, list(types), described)
    local = _local(attentions)
    if any(local) and described.get("rope_theta") is not None:
        raise export_error(
            "this layer's rotary embedding differs from the one that the configuration describes",
            attentions[local.index(True)].node,
        )
    if any(local):
        groups = {kind: attentions[local.index(kind)] for kind in (False, True)}
        bases = {kind: _checked(one, {}).base for kind, one in groups.items()}
        return RotaryFacts(base=bases[False], local_base=bases[True], local=tuple(local))
    return _checked(attentions[0], described)


def rotary_magnitude(config: Any) -> float:
    """What the rotary scaling of a configuration, YaRN's or LongRoPE's as TensorRT-LLM has them,
    multiplies turned queries and keys by."""
    scaling = _scaling(_parameters(config)) or {}
    kind = rope_type(scaling)
    if kind == "longrope":
        original = scaling["original_max_position_embeddings"]
        factor = (getattr(config, "max_position_embeddings", None) or original) / original
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    if kind != "yarn":
        return 1.0
    grown = 0.1 * math.log(max(scaling["factor"], 1.0))
    whole, part = (scaling.get(n, d) for n, d in (("mscale", 1.0), ("mscale_all_dim", 0.0)))
    result: float = (grown * whole + 1.0) / (grown * part + 1.0)
    return result


def _by_type(
    attentions: list[Attention], types: list[str], described: Mapping[str, Any]
) -> RotaryFacts:
    """Of a configuration that describes the embeddings of each type of layer."""
    facts = {}
    for attention, kind in zip(attentions, types, strict=True):
        facts[kind] = _checked(attention, described[kind])
    local = tuple(kind == "sliding_attention" for kind in types)
    slides, whole = (described.get(k) for k in ("sliding_attention", "full_attention"))
    if slides is None or whole is None:
        only = next(iter(facts.values()))
        return RotaryFacts(base=only.base, scaling=only.scaling)
    return RotaryFacts(
        base=float(whole["rope_theta"]),
        scaling=_scaling(whole),
        local_base=float(slides["rope_theta"]),
        local=local,
    )


def _local(attentions: list[Attention]) -> list[bool]:
    """Which layers turn faster than the slowest: those that see a window, where there are two."""
    last = []
    for attention in attentions:
        assert attention.rotary is not None
        last.append(attention.rotary.angles[-1].item())
    kinds = sorted({float(f"{angle:.5g}") for angle in last})
    if len(kinds) > 2:
        raise export_error(
            "this layer's rotary embedding differs from that of two others", attentions[-1].node
        )
    return [float(f"{angle:.5g}") != kinds[0] for angle in last]


def _checked(attention: Attention, described: Mapping[str, Any]) -> RotaryFacts:
    rotary = attention.rotary
    assert rotary is not None
    base, scaling = described.get("rope_theta"), _scaling(described)
    tolerance = max(1e-4, rotary.precision)
    if base is None:
        if rotary.precision > 1e-4:
            raise export_error(
                f"rotary frequencies are known to {rotary.precision:.1g} only, and no "
                "configuration says their base",
                attention.node,
                "Keep the buffer of frequencies in float32.",
            )
        # of which plain frequencies are the powers
        power = -(rotary.dim - 2) / rotary.dim
        last = rotary.angles[-1].item()
        base = float(f"{last ** (1 / power):.6g}") if power else _PLAIN_BASE
    expected = frequencies(float(base), rotary.dim, scaling)
    same = expected.shape == rotary.angles.shape
    if not same or not torch.allclose(rotary.angles, expected, rtol=tolerance, atol=0):
        off = (rotary.angles - expected).abs() / expected if same else torch.ones(1)
        worst = int(off.argmax())
        raise export_error(
            f"rotary base {base:g} and scaling {scaling} give frequency {expected[worst]:.6g} in "
            f"place {worst}, the graph has {rotary.angles[worst]:.6g}",
            attention.node,
        )
    return RotaryFacts(base=float(base), scaling=scaling)


def _parameters(config: Any) -> dict[str, Any]:
    """rope_theta and scaling in one, as transformers 5 keeps them, of a configuration of 4 too."""
    both = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    found = dict(both) if both else {}
    if any(isinstance(value, Mapping) for value in found.values()):
        return found
    # GPT-J's configuration has the dims that turn, and no other base than this
    fixed = _PLAIN_BASE if getattr(config, "rotary_dim", None) is not None else None
    theta = getattr(config, "rope_theta", fixed)
    if found.get("rope_theta") is None and theta is not None:
        found["rope_theta"] = theta
    if (kind := rope_type(found)) in ("yarn", "longrope", "llama3"):
        for name in ("original_max_position_embeddings", "max_position_embeddings"):
            original = found.get("original_max_position_embeddings") or getattr(config, name, None)
            if original is not None:
                found["original_max_position_embeddings"] = original
        found["rope_type"] = kind
    return found


def _scaling(described: Mapping[str, Any]) -> dict[str, Any] | None:
    """All but base and part of the head that turns; None where nothing is scaled."""
    if rope_type(described) == "default":
        return None
    beside = ("rope_theta", "partial_rotary_factor")
    return {k: v for k, v in described.items() if k not in beside and v is not None}


def frequencies(base: float, dim: int, scaling: Mapping[str, Any] | None) -> Tensor:
    """The `dim // 2` angles a rotary embedding turns by at position 1.

    scaling: None, or of the rope_type linear, llama3, yarn or longrope, with the fields of Hugging
    Face configurations; of longrope the factors for short sequences. Raises ExportError for
    another type.
    """
    freq: Tensor = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if scaling is None:
        return freq
    kind = rope_type(scaling)
    if kind == "longrope":
        return freq / torch.tensor(scaling["short_factor"], dtype=torch.float64)
    if kind == "linear":
        return freq / scaling["factor"]
    if kind not in ("llama3", "yarn"):
        raise export_error(f"rotary embeddings of type {kind!r} are not known to the exporter")
    original = scaling["original_max_position_embeddings"]
    if kind == "llama3":  # long waves slowed by `factor`, short ones kept
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        kept = ((original * freq / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    else:  # pairs that turn often are kept, those that turn seldom slowed by `factor`
        first, last = (
            dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))
            for turns in (scaling.get("beta_fast") or 32, scaling.get("beta_slow") or 1)
        )
        first, last = max(math.floor(first), 0), min(math.ceil(last), dim - 1)
        pairs = torch.arange(dim // 2, dtype=torch.float64)
        kept = 1 - ((pairs - first) / (last - first or 0.001)).clamp(0, 1)
    return freq / scaling["factor"] * (1 - kept) + freq * kept


def rope_type(scaling: Mapping[str, Any]) -> str:
    """The type of a scaling, under its new or its old name."""
    return str(scaling.get("rope_type", scaling.get("type", "default")))
