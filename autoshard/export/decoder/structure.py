"""What the exporters know of a decoder: its parts by the role of each parameter."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx


@dataclass(frozen=True, kw_only=True)
class Linear:
    """A matrix product with a parameter. weight, bias: names of parameters.

    transposed: the weight is stored (in, out), or (experts, in, out). rows: which of its outputs
    are used, in which order; None: all, as stored. node: where the graph multiplies.
    """

    weight: str
    bias: str | None
    transposed: bool
    outputs: int
    inputs: int
    node: fx.Node
    rows: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Norm:
    """A normalisation over the last dim. kind: "layer" or "rms". zero_centred: multiplies by
    1 + weight."""

    kind: str
    weight: str
    bias: str | None
    eps: float
    zero_centred: bool
    node: fx.Node


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """A rotary embedding of the first `dim` dims of each head. angles: those it turns by at
    position 1, one a pair; the pairs are neighbours where `interleaved`, else i and i + dim / 2.
    magnitude: what the dims that turn are multiplied by, beside those that do not (1 where all do).
    precision: relative, of the angles: `model.half()` rounds the frequencies too.
    """

    angles: torch.Tensor
    dim: int
    interleaved: bool
    magnitude: float
    precision: float


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Causal attention. query, key, value: rows are heads in order, `head_dim` rows each.

    query_norm, key_norm: over each head, before the rotary embedding. scale: what products of
    queries and keys are multiplied by, all factors on either included. softcap: c of
    c * tanh(scores / c). slopes: of ALiBi, one a head. window: how many tokens each sees, where
    that is fewer than the example has.
    """

    heads: int
    kv_heads: int
    head_dim: int
    query: Linear
    key: Linear
    value: Linear
    dense: Linear
    query_norm: Norm | None
    key_norm: Norm | None
    rotary: Rotary | None
    scale: float
    softcap: float | None
    slopes: torch.Tensor | None
    window: int | None
    node: fx.Node


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """up, gate and down; gate None: the activation is applied to `up`. With experts, each Linear
    is of all experts, (experts, out, in), and `router` chooses `top_k` of them by a softmax;
    renormalised: the weights of the chosen are divided by their sum. shared: an MLP of all tokens
    beside them, multiplied by the sigmoid of `shared_gate` where there is one."""

    up: Linear
    gate: Linear | None
    down: Linear
    activation: str
    router: Linear | None = None
    experts: int = 0
    top_k: int = 0
    renormalised: bool = True
    shared: Mlp | None = None
    shared_gate: Linear | None = None

    @property
    def width(self) -> int:
        """The size between up and down."""
        return self.down.inputs


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One block. parallel: the MLP reads what attention reads, or a norm of the same, not the
    result of attention. Where both read the same norm, mlp_norm is attention_norm. The post norms
    are of the result of attention and of the MLP, before it is added."""

    attention: Attention
    mlp: Mlp
    attention_norm: Norm
    mlp_norm: Norm
    post_attention_norm: Norm | None
    post_mlp_norm: Norm | None
    parallel: bool


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A decoder-only language model. embedding_scale: what token embeddings are multiplied by.

    tied: head and embedding are the same parameter. positions: a learned table, [rows, hidden],
    whose row `first_position` is that of the first token; max_positions: rows from there on.
    embedding_norm: of the embeddings, before the first layer. softcap: c of c * tanh(logits / c).
    """

    vocab: int
    hidden: int
    embedding: str
    embedding_scale: float
    embedding_norm: Norm | None
    positions: str | None
    first_position: int
    max_positions: int | None
    layers: tuple[Layer, ...]
    norm: Norm
    head: Linear
    softcap: float | None

    @property
    def tied(self) -> bool:
        return self.head.weight == self.embedding
