"""What tells model families apart, read off a decoder: each feature a name and a plain value."""

from __future__ import annotations

import math

from autoshard.export.decoder import Decoder, Layer
from autoshard.export.errors import export_error

ROTARY, PART, NEIGHBOURS = "rotary", "rotary in part", "rotary of neighbours"
"""Positions: pairs of dims half a head apart, the same of the first dims, pairs of neighbours."""


def position_type(decoder: Decoder) -> str:
    """TensorRT-LLM's name of how positions enter."""
    attention = decoder.layers[0].attention
    if attention.rotary is not None:
        return "rope_gptj" if attention.rotary.interleaved else "rope_gpt_neox"
    return "learned_absolute" if attention.slopes is None else "alibi"


def features(decoder: Decoder, magnitude: float = 1.0) -> dict[str, object]:
    """What tells families apart, by name. magnitude: what a configuration's rotary scaling
    multiplies turned queries and keys by. Raises ExportError where layers differ in a feature."""
    first = _layer_features(decoder, decoder.layers[0], magnitude)
    for layer in decoder.layers[1:]:
        other = _layer_features(decoder, layer, magnitude)
        differ = [name for name in first if first[name] != other[name]]
        wrong = [f"{name} {other[name]}, not {first[name]}" for name in differ]
        if wrong:
            raise export_error(f"this layer has {', '.join(wrong)}", layer.attention.node)
    windows = any(layer.attention.window is not None for layer in decoder.layers)
    scaled = not math.isclose(decoder.embedding_scale, 1.0, rel_tol=1e-6)
    root = math.isclose(decoder.embedding_scale, math.sqrt(decoder.hidden), rel_tol=1e-2)
    return {
        **first,
        "norm of embeddings": decoder.embedding_norm is not None,
        "bias of the head": decoder.head.bias is not None,
        "cap of logits": decoder.softcap is not None,
        "sliding window": windows,
        "scaled embeddings": scaled if root or not scaled else f"by {decoder.embedding_scale:g}",
        "tied head": decoder.tied,
    }


def _layer_features(decoder: Decoder, layer: Layer, magnitude: float) -> dict[str, object]:
    attention, mlp, norm = layer.attention, layer.mlp, layer.attention_norm
    norms = [norm, layer.mlp_norm, decoder.norm, decoder.embedding_norm]
    norms += [layer.post_attention_norm, layer.post_mlp_norm]
    of_heads = [attention.query_norm, attention.key_norm]
    alike = {
        (one.kind, one.zero_centred, one.eps, one.bias is None)
        for one in [*norms, *of_heads]
        if one is not None
    }
    biased = (norm.bias is None) == (norm.kind == "rms")
    kind = norm.kind if len(alike) == 1 and biased else "of several kinds, or without bias"
    after = [one is not None for one in (layer.post_attention_norm, layer.post_mlp_norm)]
    heads = [one is not None for one in of_heads]
    return {
        "norms": kind,
        "norms of 1 + weight": norm.zero_centred,
        "norms of queries and keys": heads[0] if len(set(heads)) == 1 else "of one of them",
        "norms after attention and MLP": after[0] if len(set(after)) == 1 else "of one of them",
        "positions": _positions(decoder, layer),
        "MLP": _mlp(layer),
        "MLP beside attention": layer.parallel,
        "biases": _biases(layer),
        "cap of scores": attention.softcap is not None,
        "scale of scores other than 1/sqrt(head_dim)": _scale(layer, magnitude),
        "grouped key heads": attention.kv_heads != attention.heads,
        "MLP of 4 x hidden": mlp.width == 4 * decoder.hidden,
        "heads": (attention.heads, attention.kv_heads, attention.head_dim),
        "MLP width and activation": (mlp.width, mlp.activation, mlp.experts, mlp.top_k),
        "eps": norm.eps,
    }


def _positions(decoder: Decoder, layer: Layer) -> str:
    rotary, slopes = layer.attention.rotary, layer.attention.slopes
    kinds = []
    if rotary is not None:
        part = PART if rotary.dim < layer.attention.head_dim else ROTARY
        kinds.append(NEIGHBOURS if rotary.interleaved else part)
    if slopes is not None:
        standard = _standard_slopes(layer.attention.heads)
        close = all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(slopes.tolist(), standard))
        kinds.append("ALiBi" if close and len(slopes) == len(standard) else "ALiBi of other slopes")
    if decoder.positions is not None:
        kinds.append("learned")
    return " and ".join(kinds) or "none"


def _standard_slopes(heads: int) -> list[float]:
    """ALiBi's slopes: powers of 2; those of the next power of 2, every second, for the rest."""
    power = 2 ** math.floor(math.log2(heads))
    first = [2 ** (-8 / power * (i + 1)) for i in range(power)]
    return first + [2 ** (-4 / power * (2 * i + 1)) for i in range(heads - power)]


def _mlp(layer: Layer) -> str:
    mlp = layer.mlp
    if not mlp.experts:
        return "plain" if mlp.gate is None else "gated"
    if mlp.shared is None:
        return "experts"
    gated = mlp.shared.gate is not None and mlp.shared.activation == mlp.activation
    one = mlp.shared.down.bias is None and mlp.shared.up.bias is None
    kind = "a gated MLP of all tokens" if gated and one and mlp.shared_gate else "another MLP"
    return f"experts and {kind}"


def _biases(layer: Layer) -> str:
    attention, mlp = layer.attention, layer.mlp
    has = {
        "qkv": {one.bias is not None for one in (attention.query, attention.key, attention.value)},
        "dense": {attention.dense.bias is not None},
        "MLP": {one.bias is not None for one in (mlp.up, mlp.gate, mlp.down) if one is not None},
    }
    if any(len(values) > 1 for values in has.values()):
        return "of some of query, key and value, or of the MLP"
    names = [name for name, values in has.items() if values == {True}]
    known = {
        (): "none",
        ("qkv",): "qkv",
        ("MLP",): "MLP",
        ("qkv", "dense"): "attention",
        ("qkv", "dense", "MLP"): "all",
    }
    return known.get(tuple(names), " and ".join(names))


def _scale(layer: Layer, magnitude: float) -> bool:
    """Whether scores are scaled by other than the root of the head's size and `magnitude`."""
    attention, rotary = layer.attention, layer.attention.rotary
    plain, of_part = attention.head_dim**-0.5, 1.0
    if rotary is not None and rotary.dim < attention.head_dim:
        of_part = magnitude
    elif rotary is not None:
        plain *= magnitude**2
    same = rotary is None or math.isclose(rotary.magnitude, of_part, rel_tol=1e-6)
    return not (same and math.isclose(attention.scale, plain, rel_tol=1e-6))
