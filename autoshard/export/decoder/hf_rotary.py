"""The rotary embeddings that a configuration describes against those that the graph has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.export.decoder.rotary import fitted_base, frequencies, magnitude, rope_type
from autoshard.export.decoder.structure import Attention, Decoder
from autoshard.export.errors import export_error

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
    """What the rotary scaling of a configuration multiplies turned queries and keys by."""
    described = _parameters(config)
    longest = getattr(config, "max_position_embeddings", None)
    return 1.0 if _nested(described) else magnitude(_scaling(described), longest)


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
        base = fitted_base(rotary.angles, rotary.dim)
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
    if _nested(found):
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


def _nested(described: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Mapping) for value in described.values())


def _scaling(described: Mapping[str, Any]) -> dict[str, Any] | None:
    """All but base and part of the head that turns; None where nothing is scaled."""
    if rope_type(described) == "default":
        return None
    beside = ("rope_theta", "partial_rotary_factor")
    return {k: v for k, v in described.items() if k not in beside and v is not None}
