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
class Attention:
    """Causal attention. query, key, value: rows are heads in order, `head_dim` rows each.

    rotary: the angles a half-split rotary embedding turns query and key by at position 1, or None.
    precision: relative, of those angles: `model.half()` rounds the frequencies too.
    """

    heads: int
    kv_heads: int
    head_dim: int
    query: Linear
    key: Linear
    value: Linear
    dense: Linear
    rotary: torch.Tensor | None
    precision: float
    node: fx.Node


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """up, gate and down; gate None: the activation is applied to `up`. With experts, each Linear
    is of all experts, (experts, out, in), and `router` chooses `top_k` of them."""

    up: Linear
    gate: Linear | None
    down: Linear
    activation: str
    router: Linear | None = None
    experts: int = 0
    top_k: int = 0

    @property
    def width(self) -> int:
        """The size between up and down."""
        return self.down.inputs


@dataclass(frozen=True)
class Layer:
    """One block. parallel: the MLP reads what attention reads, or a norm of the same, not the
    result of attention. Where both read the same norm, mlp_norm is attention_norm."""

    attention: Attention
    mlp: Mlp
    attention_norm: Norm
    mlp_norm: Norm
    parallel: bool


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A decoder-only language model. embedding_scale: what token embeddings are multiplied by.

    tied: head and embedding are the same parameter. positions: a learned table, [length, hidden].
    """

    vocab: int
    hidden: int
    embedding: str
    embedding_scale: float
    positions: str | None
    max_positions: int | None
    layers: tuple[Layer, ...]
    norm: Norm
    head: Linear

    @property
    def tied(self) -> bool:
        return self.head.weight == self.embedding
