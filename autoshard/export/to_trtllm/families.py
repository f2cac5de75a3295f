"""The model families of TensorRT-LLM's checkpoints: what each may consist of, as a table.

TensorRT-LLM has a class for each family whose layers are fixed; what a decoder has beyond them
would be lost. Names of architectures are those of its MODEL_MAP, 0.20 to 1.2. What tells families
apart is read off a decoder: each feature a name and a plain value.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autoshard.export.decoder import Decoder, Layer, architecture_of, rotary_magnitude
from autoshard.export.errors import export_error

ROTARY, PART, NEIGHBOURS = "rotary", "rotary in part", "rotary of neighbours"
"""Positions: pairs of dims half a head apart, the same of the first dims, pairs of neighbours."""

_GELUS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
_REMEDY = (
    "Serve a Hugging Face directory instead (autoshard export huggingface), which TensorRT-LLM's "
    "PyTorch backend and vLLM read."
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family. architectures: the names it covers, the first where no configuration gives one.
    activations: the names it gives to
    functions. has: for each feature (`features`), the values it may have; others are as in _PLAIN.

    mlp_norm: the name of the norm before the MLP. eps: of its norms, where no field of its
    configuration says it. stages: whether it may be cut into pipeline stages. own_activation:
    whether it takes a configuration's name of one. fused_gate: up and gate are one projection.
    shares_embedding: no head of its own is written.
    """

    name: str
    architectures: tuple[str, ...]
    has: Mapping[str, tuple[object, ...]]
    activations: Mapping[str, str] = field(default_factory=lambda: {"silu": "silu"})
    mlp_norm: str = "post_layernorm"
    eps: float | None = None
    stages: bool = True
    own_activation: bool = False
    fused_gate: bool = False
    shares_embedding: bool = False


_PLAIN: dict[str, tuple[object, ...]] = {
    "norms": ("rms",),
    "norms of 1 + weight": (False,),
    "norms of queries and keys": (False,),
    "norms after attention and MLP": (False,),
    "norm of embeddings": (False,),
    "positions": (ROTARY,),
    "MLP": ("gated",),
    "MLP beside attention": (False,),
    "biases": ("none",),
    "bias of the head": (False,),
    "cap of scores": (False,),
    "cap of logits": (False,),
    "scale of scores other than 1/sqrt(head_dim)": (False,),
    "sliding window": (False,),
    "scaled embeddings": (False,),
    "grouped key heads": (False, True),
    "MLP of 4 x hidden": (False, True),
    "tied head": (False, True),
}
_GEMMA = {
    "norms of 1 + weight": (True,),
    "scaled embeddings": (True,),
    "tied head": (True,),
}
_GEMMA2 = {
    **_GEMMA,
    "norms after attention and MLP": (True,),
    "scale of scores other than 1/sqrt(head_dim)": (False, True),
    "cap of logits": (False, True),
    "sliding window": (False, True),
}
_LAYER_NORMS = {"norms": ("layer",), "MLP": ("plain",)}
_ONE_HEAD_EACH = {"grouped key heads": (False,)}

LLAMA = Family(
    name="llama",
    architectures=("LlamaForCausalLM", "MistralForCausalLM"),
    has={"biases": ("none", "attention", "MLP", "all")},
    own_activation=True,
)
QWEN2 = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    has={"biases": ("qkv",)},
    own_activation=True,
)
QWEN3 = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    has={"norms of queries and keys": (True,)},
    own_activation=True,
)
MIXTRAL = Family(
    name="mixtral",
    architectures=("MixtralForCausalLM",),
    activations={"silu": "swiglu"},
    has={"MLP": ("experts",)},
)
QWEN2_MOE = Family(
    name="qwen2_moe",
    architectures=("Qwen2MoeForCausalLM",),
    activations={"silu": "swiglu"},
    has={"MLP": ("experts and a gated MLP of all tokens",), "biases": ("qkv",)},
)
QWEN3_MOE = Family(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    activations={"silu": "swiglu"},
    has={"MLP": ("experts",), "norms of queries and keys": (True,)},
)
PHI3 = Family(
    name="phi3",
    architectures=("Phi3ForCausalLM",),
    activations={"silu": "swiglu"},
    has={"positions": (ROTARY, PART)},
    stages=False,
    fused_gate=True,
)
GEMMA = Family(
    name="gemma",
    architectures=("GemmaForCausalLM",),
    activations=_GELUS,
    has=_GEMMA,
    own_activation=True,
    shares_embedding=True,
)
GEMMA2 = Family(
    name="gemma2",
    architectures=("Gemma2ForCausalLM",),
    activations=_GELUS,
    has={**_GEMMA2, "cap of scores": (False, True)},
    mlp_norm="pre_feedforward_layernorm",
    own_activation=True,
    shares_embedding=True,
)
GEMMA3 = Family(
    name="gemma3",
    architectures=("Gemma3ForCausalLM",),
    activations=_GELUS,
    has={**_GEMMA2, "norms of queries and keys": (True,)},
    mlp_norm="pre_feedforward_layernorm",
    own_activation=True,
    shares_embedding=True,
)
GPT2 = Family(
    name="gpt2",
    architectures=("GPT2LMHeadModel",),
    activations={"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu"},
    has={**_LAYER_NORMS, "positions": ("learned",), "biases": ("all", "none")},
    own_activation=True,
)
OPT = Family(
    name="opt",
    architectures=("OPTForCausalLM",),
    activations={"relu": "relu", "gelu": "gelu", "gelu_tanh": "gelu_new"},
    has={**_LAYER_NORMS, **_ONE_HEAD_EACH, "positions": ("learned",), "biases": ("all",)},
    eps=1e-5,
    stages=False,
)
BLOOM = Family(
    name="bloom",
    architectures=("BloomForCausalLM",),
    activations={"gelu_tanh": "gelu"},
    has={
        **_LAYER_NORMS,
        **_ONE_HEAD_EACH,
        "positions": ("ALiBi",),
        "biases": ("all",),
        "norm of embeddings": (True,),
    },
    eps=1e-5,
    stages=False,
)
FALCON = Family(
    name="falcon",
    architectures=("FalconForCausalLM",),
    activations={"gelu": "gelu"},
    has={**_LAYER_NORMS, "biases": ("all", "none"), "MLP beside attention": (False, True)},
    mlp_norm="mlp_layernorm",
)
GPT_NEOX = Family(
    name="gpt_neox",
    architectures=("GPTNeoXForCausalLM",),
    activations={"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu"},
    has={
        **_LAYER_NORMS,
        **_ONE_HEAD_EACH,
        "positions": (PART, ROTARY),
        "biases": ("all",),
        "MLP beside attention": (True,),
        "MLP of 4 x hidden": (True,),
    },
    mlp_norm="post_attention_layernorm",
    eps=1e-5,
    stages=False,
    own_activation=True,
)
GPTJ = Family(
    name="gptj",
    architectures=("GPTJForCausalLM",),
    activations={"gelu_tanh": "gelu", "gelu": "gelu"},
    has={
        **_LAYER_NORMS,
        **_ONE_HEAD_EACH,
        "positions": (NEIGHBOURS,),
        "biases": ("MLP",),
        "bias of the head": (True,),
        "MLP beside attention": (True,),
        "MLP of 4 x hidden": (True,),
    },
    eps=1e-5,
    stages=False,
)
STARCODER2 = Family(
    name="starcoder2",
    architectures=("Starcoder2ForCausalLM",),
    activations={"gelu_tanh": "gelu", "gelu": "gelu"},
    has={**_LAYER_NORMS, "biases": ("all", "none")},
)

FAMILIES = (
    *(LLAMA, QWEN2, QWEN3, MIXTRAL, QWEN2_MOE, QWEN3_MOE, PHI3, GEMMA, GEMMA2, GEMMA3),
    *(GPT2, OPT, BLOOM, FALCON, GPT_NEOX, GPTJ, STARCODER2),
)
"""In the order of preference, where no configuration names one."""


def family_of(decoder: Decoder, hf_config: Any = None) -> Family:
    """The family that a configuration names, else the first whose layers these are.

    Raises ExportError, saying what differs, where there is none.
    """
    found = features(decoder, rotary_magnitude(hf_config))
    node = decoder.layers[0].attention.node
    named = architecture_of(hf_config, [name for one in FAMILIES for name in one.architectures])
    if named is not None:
        family = next(one for one in FAMILIES if named in one.architectures)
        if wrong := _differences(family, found, decoder):
            raise export_error(
                f"TensorRT-LLM's {named} is fixed in what this model has otherwise: "
                f"{'; '.join(wrong)}",
                node,
                _REMEDY,
            )
        return family
    for family in FAMILIES:
        if not _differences(family, found, decoder):
            return family
    closest = min(FAMILIES, key=lambda one: len(_differences(one, found, decoder)))
    raise export_error(
        "layers of this kind have no family in TensorRT-LLM's checkpoints; the closest, "
        f"{closest.name}, differs: {'; '.join(_differences(closest, found, decoder))}",
        node,
        _REMEDY,
    )


def _differences(family: Family, found: Mapping[str, object], decoder: Decoder) -> list[str]:
    allowed = {**_PLAIN, **family.has}
    wrong = [
        f"{name} is {found[name]}, not {' or '.join(map(str, ok))}"
        for name, ok in allowed.items()
        if found[name] not in ok
    ]
    eps = decoder.norm.eps
    if family.eps is not None and not math.isclose(eps, family.eps, rel_tol=1e-6):
        wrong.append(f"eps of norms is {eps:g}, not {family.eps:g}")
    first = decoder.layers[0]
    if first.mlp.activation not in family.activations:
        wrong.append(f"activation is {first.mlp.activation}, not {' or '.join(family.activations)}")
    if family is GPTJ and first.parallel and first.mlp_norm is not first.attention_norm:
        wrong.append("norms beside each other are two, not one")
    return wrong


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
    scaled = not math.isclose(decoder.embedding_scale, 1.0, rel_tol=1e-6)
    root = math.isclose(decoder.embedding_scale, math.sqrt(decoder.hidden), rel_tol=1e-2)
    return {
        **first,
        "norm of embeddings": decoder.embedding_norm is not None,
        "bias of the head": decoder.head.bias is not None,
        "cap of logits": decoder.softcap is not None,
        "sliding window": any(one.attention.window is not None for one in decoder.layers),
        "scaled embeddings": scaled if root or not scaled else f"by {decoder.embedding_scale:g}",
        "tied head": decoder.tied,
    }


def _layer_features(decoder: Decoder, layer: Layer, magnitude: float) -> dict[str, object]:
    attention, mlp, norm = layer.attention, layer.mlp, layer.attention_norm
    of_heads = [attention.query_norm, attention.key_norm]
    norms = [norm, layer.mlp_norm, decoder.norm, decoder.embedding_norm, *of_heads]
    norms += [layer.post_attention_norm, layer.post_mlp_norm]
    alike = {(n.kind, n.zero_centred, n.eps, n.bias is None) for n in norms if n is not None}
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
        heads = layer.attention.heads
        power = 2 ** math.floor(math.log2(heads))
        # powers of 2; those of the next power of 2, every second, for the rest
        standard = [2 ** (-8 / power * (i + 1)) for i in range(power)]
        standard += [2 ** (-4 / power * (2 * i + 1)) for i in range(heads - power)]
        close = all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(slopes.tolist(), standard))
        kinds.append("ALiBi" if close and len(slopes) == len(standard) else "ALiBi of other slopes")
    if decoder.positions is not None:
        kinds.append("learned")
    return " and ".join(kinds) or "none"


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
