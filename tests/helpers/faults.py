"""Faults to plant, by name: what is replaced, and the model and mesh in which it must show.

`factories` of the same names plant one in the process that makes the model, which is how a fault
gets into the processes of `autoshard.verify`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from autoshard.passes import data_parallel, localize
from autoshard.planning import rules
from autoshard.planning.rules import reductions, registry
from autoshard.planning.rules.layers import SEED
from autoshard.planning.strategy import Strategy
from autoshard.runtime import randomness
from autoshard.runtime.collectives import redistribution as collectives
from autoshard.runtime.collectives.axis import Axis
from autoshard.runtime.collectives.states import I, P, R
from autoshard.runtime.randomness import draws as random_ops

SEQ, WIDTH, WORDS = 16, 32, 64


class Net(nn.Module):
    """Embedding, norm, a two-layer MLP with dropout, a head and the loss of its words."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(p)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.embed(ids)
        wide = self.drop(F.gelu(self.up(self.norm(h))))
        logits = self.head(h + self.down(wide))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), ids.flatten()), "logits": logits}


class Averaged(nn.Module):
    """A mean over a dim that is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 16 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.up(x)).mean(-1)


def model(p: float = 0.0) -> tuple[nn.Module, tuple[torch.Tensor]]:
    """The model and a batch for all data-parallel ranks."""
    return Net(p), (torch.randint(WORDS, (4, SEQ)),)


def dropping() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """The same with dropout."""
    return model(0.3)


def averaging() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """The mean, with its input."""
    return Averaged(), (torch.randn(4, SEQ, WIDTH),)


class Fault(NamedTuple):
    """`setattr(place, name, faulty)`; spared: the kinds of rows that it leaves right."""

    place: Any
    name: str
    faulty: Any
    make: Callable[[], Any] = model
    mesh: tuple[tuple[str, int], ...] = (("tp", 2),)
    spared: tuple[str, ...] = ()


_change, _strategies, _unshard = localize.redistribute, registry.strategies, data_parallel.unshard
_all_reduce, _shared_seed = collectives.all_reduce, random_ops.shared_seed
_backward = collectives._Redistribute.backward


def _without(have: str, want: str) -> Callable[..., Any]:
    def change(x: Any, src: str, dst: str, *rest: Any) -> Any:
        return x if (src, dst) == (have, want) else _change(x, src, dst, *rest)

    return change


def _whole_linear(node: Any, n: int) -> Any:
    """A row-parallel linear that says its partial result is whole."""
    offered, reasons = _strategies(node, n)
    wrong = [s._replace(output=I) if s.output == P else s for s in offered]
    return (wrong if "linear" in str(node.target) else offered), reasons


def _reduced_by(op: str) -> Callable[..., Any]:
    return lambda x, _, axis: _all_reduce(x, op, axis)


def _averaged(x: torch.Tensor, op: str, axis: Axis) -> torch.Tensor:
    return _all_reduce(x, op, axis) / (axis.size if op == "sum" else 1)


def _same_part(first: Any, *args: Any, op: str, dim: int, extent: Any, axis: Axis) -> Any:
    """Each rank draws the numbers of the first part."""
    return getattr(random_ops, op)(first, *args)


def _own_seed(device: Any, *, axis: Axis) -> torch.Tensor:
    return _shared_seed(device, axis=axis) + axis.rank


def _unscaled(x: Any, *args: Any, op: Any, axis: Axis, **kwargs: Any) -> Any:
    kwargs = {k: v for k, v in kwargs.items() if k not in ("sharded_dim", "extent")}
    return op(x, *args, **kwargs)


def _unreduced(ctx: Any, grad: torch.Tensor) -> Any:
    return (grad, *[None] * 4) if ctx.back[:2] == (P, I) else _backward(ctx, grad)


def _nan(ctx: Any, grad: torch.Tensor) -> Any:
    first, *rest = _backward(ctx, grad)
    return (first * float("nan"), *rest)


def _summed(x: torch.Tensor, src: str, axis: Axis, extent: int | None = None) -> torch.Tensor:
    return _change(x, src, R, axis, extent)


def _not_reduced(x: torch.Tensor, src: str, axis: Axis, extent: int | None = None) -> Any:
    return x if src == I else _unshard(x, src, axis, extent)


FAULTS: dict[str, Fault] = {
    "rule": Fault(rules, "strategies", _whole_linear),
    "dropped_all_reduce": Fault(localize, "redistribute", _without(P, I)),
    "max_for_sum": Fault(collectives, "all_reduce", _reduced_by("max")),
    "mean_for_sum": Fault(collectives, "all_reduce", _averaged),
    "masks_alike": Fault(randomness, "on_shard", _same_part, dropping),
    "masks_apart": Fault(
        registry, "SEEDS", {**registry.SEEDS, SEED: Strategy((), I, _own_seed)}, dropping
    ),
    "mean_of_a_shard": Fault(reductions, "share_of_mean", _unscaled, averaging),
    "gradient_not_reduced": Fault(
        collectives._Redistribute, "backward", staticmethod(_unreduced), spared=("output", "loss")
    ),
    "gradient_nan": Fault(
        collectives._Redistribute, "backward", staticmethod(_nan), spared=("output", "loss")
    ),
    "data_sum_for_mean": Fault(
        data_parallel, "unshard", _summed, mesh=(("dp_shard", 2),), spared=("output", "loss")
    ),
    "data_not_reduced": Fault(
        data_parallel,
        "unshard",
        _not_reduced,
        mesh=(("dp_replicate", 2), ("tp", 2)),
        spared=("output", "loss"),
    ),
}


def gradient_nan() -> Any:
    """A factory that plants a fault in the backward alone, for good in this process."""
    fault = FAULTS["gradient_nan"]
    setattr(fault.place, fault.name, fault.faulty)
    return fault.make()
