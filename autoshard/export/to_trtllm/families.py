"""The model families of TensorRT-LLM's checkpoints: what each may consist of, as a table.

TensorRT-LLM has a class for each family whose layers are fixed; what a decoder has beyond them
would be lost. Names of architectures are those of its MODEL_MAP, 0.20 to 1.2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoshard.export.decoder import Decoder, architecture_of, rotary_magnitude
from autoshard.export.errors import export_error
from autoshard.export.to_trtllm.features import NEIGHBOURS, PART, ROTARY, features

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
    activations: Mapping[str, str]
    has: Mapping[str, tuple[object, ...]]
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
    activations={"silu": "silu"},
    has={"biases": ("none", "attention", "MLP", "all")},
    own_activation=True,
)
QWEN2 = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    activations={"silu": "silu"},
    has={"biases": ("qkv",)},
    own_activation=True,
)
QWEN3 = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    activations={"silu": "silu"},
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
        wrong = _differences(family, found, decoder)
        if wrong:
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
    activation = decoder.layers[0].mlp.activation
    if activation not in family.activations:
        wrong.append(f"activation is {activation}, not {' or '.join(family.activations)}")
    if decoder.layers[0].parallel and family is GPTJ:
        if decoder.layers[0].mlp_norm is not decoder.layers[0].attention_norm:
            wrong.append("norms beside each other are two, not one")
    return wrong
