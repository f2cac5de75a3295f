"""What an operator does on one rank, of which `Cluster.seconds` makes seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoshard.planning.cost.model import node_bytes, node_flops


@dataclass(frozen=True)
class OperatorWork:
    """flops: operations on `dtype`. nbytes: through memory. narrowest: the smallest extent of a
    matrix product, where it is known. attention: whether the operations are attention's."""

    flops: float
    nbytes: float
    dtype: torch.dtype
    narrowest: float = math.inf
    attention: bool = False


def work_of(node: fx.Node) -> OperatorWork:
    """The work of an operator whose shapes are those of a rank."""
    return OperatorWork(node_flops(node), node_bytes(node), dtype_made(node))


def dtype_made(node: fx.Node) -> torch.dtype:
    """The dtype of the first tensor that an operator makes."""
    made = pytree.tree_leaves(node.meta["val"])
    return next((one.dtype for one in made if isinstance(one, torch.Tensor)), torch.float32)
