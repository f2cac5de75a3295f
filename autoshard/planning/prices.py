"""The planner's prices on one mesh axis: seconds of stored bytes and of changes of state."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from torch import fx

from autoshard.planning import cost
from autoshard.planning.cost import Machine, OperatorWork
from autoshard.planning.strategy import parts_of, value
from autoshard.planning.values import differentiable, global_bytes
from autoshard.runtime.collectives import P, R, State, shard_dim
from autoshard.runtime.graph_meta import DIFF

# Bytes the training state keeps for each byte of a parameter: itself, its gradient, and two
# moments of Adam.
TRAINED_BYTES = 4.0

# Norm weights and biases are a thousandth of a model: splitting one is not worth a collective.
VECTOR_DISCOUNT = 1e-3


@dataclass(frozen=True)
class Prices:
    """Prices of a stored byte, in seconds a step; None for the defaults.

    Whoever asks for a tp axis wants the weights split: by default a megabyte that every rank
    keeps whole must save a millisecond a step to be worth it, and in a small model an average
    weight is worth the latency of several collectives. A weight that is gathered for its use is
    charged that where it is kept until backward, or else one more gather: the cheaper of the two.
    Activations cost two more passes over memory, which is what a saved tensor causes.

    gathers_weights: whether a matrix that is stored split may be gathered for its use.
    batch_second: seconds of a step that a second of the data-parallel axes' collectives is charged,
    where what dp_shard does with each weight is chosen.
    """

    parameter_byte: float | None = None
    activation_byte: float | None = None
    gathers_weights: bool = True
    batch_second: float = 1.0


class MovedValue(NamedTuple):
    """The properties of a value that the price of moving it depends on.

    last: its last dim. read, made: seconds, on a rank, of the products that read its rows, and of
    the one that makes it, where collectives may be one operator with those; else 0. even: the dims
    along which they may.
    """

    nbytes: int
    diff: bool
    activation: bool
    outer: int
    last: int
    read: float = 0.0
    made: float = 0.0
    even: tuple[int, ...] = ()

    def spreads(self, src: State, dst: State) -> bool:
        """Whether the change starts to split an activation along the sequence or the batch.

        What a weight splits, features and heads, is born split or is the last dim. A slice of
        R is no start: every rank has computed the whole, and needs its heads only.
        """
        dim = shard_dim(dst)
        if dim is None or src == R or not self.activation:
            return False
        return src == P or dim != self.last


class StoredOnBatchAxis(Protocol):
    """What dp_shard may do with a parameter, with the seconds that is charged, by its state on the
    planned axis and the price of a byte; travels: whether a stack of experts is gathered over ep
    (search/asked.py)."""

    def charges(
        self, node: fx.Node, state: State, price: float, travels: bool = False
    ) -> dict[str, float]: ...


class AxisPrices:
    """The prices of one graph on an axis of `n` ranks of `hardware`.

    parameters: the placeholders of parameters. sequence_parallel: whether an activation may be
    split along the sequence or the batch. prices: those of a stored byte. name: of the axis.
    fusing: which collectives are one operator with the products beside them; None: none.
    batch: dp_shard, where each parameter has a choice there; else its axes are not planned.
    """

    def __init__(
        self,
        n: int,
        machine: Machine,
        parameters: Collection[fx.Node],
        sequence_parallel: bool,
        prices: Prices,
        name: str = "tp",
        fusing: cost.Fusing | None = None,
        batch: StoredOnBatchAxis | None = None,
    ) -> None:
        self.n, self.machine, self.parameters, self.name = n, machine, parameters, name
        self.link = machine.links[name]
        self.fusing, self.batch = fusing, batch
        self.sequence_parallel = sequence_parallel
        self.activation_byte = prices.activation_byte or 2.0 / machine.device.memory_bandwidth
        self.gathers_weights = prices.gathers_weights
        self.parameter_byte = prices.parameter_byte or self._default_parameter_byte()
        self.computed: set[fx.Node] = set()
        """What a graph without gradients computes of its parameters: its activations."""
        self.parts: dict[fx.Node, int] = {}
        """Parameters of which a rank uses one of so many parts, where that is decided: stacks of
        experts on ep."""
        self._changes: dict[tuple[State, State, MovedValue], float] = {}

    def link_of(self, axis: str) -> cost.Link:
        """The link of another axis by its name; "": of the planned one."""
        return self.machine.links[axis] if axis else self.link

    def _default_parameter_byte(self) -> float:
        sizes = [global_bytes(node) for node in self.parameters if value(node).dim() > 1]
        if not sizes:
            return 1e-9
        worth = 8 * len(sizes) * cost.collective_seconds("all_reduce", 0, self.n, self.link)
        return max(1e-9, worth / (TRAINED_BYTES * sum(sizes)))

    def storage(self, node: fx.Node, state: State) -> float:
        """Seconds that storing an input in `state` is charged; nothing where it is no parameter."""
        if node not in self.parameters:
            return 0.0
        price = self.stored_byte(node)
        if self.batch is not None:
            return min(self.batch.charges(node, state, price).values())
        trained = TRAINED_BYTES if node.meta.get(DIFF) else 1.0
        return global_bytes(node) * (1 / parts_of(state, self.n)) * trained * price

    def batch_choice(self, node: fx.Node, state: State, travels: bool = False) -> str:
        """What dp_shard does with a parameter in `state` on this axis; "": it has no choice.
        travels: whether it is a stack of experts that is gathered over ep."""
        if self.batch is None:
            return ""
        charged = self.batch.charges(node, state, self.stored_byte(node), travels)
        return min(charged, key=charged.__getitem__)

    def stored_byte(self, node: fx.Node) -> float:
        """Seconds that a byte of a parameter is charged."""
        return self.parameter_byte * (VECTOR_DISCOUNT if value(node).dim() < 2 else 1.0)

    def held_whole(self) -> float:
        """Seconds that keys or values are charged which every rank keeps whole for the next call:
        hardly less than the least collective, so that no plan splits what it has to gather again,
        and one that can attend by heads does, however few tokens its graph has been seen with."""
        return 0.9 * cost.collective_seconds("all_gather", 0, self.n, self.link)

    def moved(self, source: fx.Node) -> MovedValue:
        """The properties of `source`'s value that the price of moving it depends on."""
        shape = value(source).shape
        return MovedValue(
            global_bytes(source) // self.parts.get(source, 1),
            differentiable(source),
            (differentiable(source) and source not in self.parameters) or source in self.computed,
            cost.outer_dim(shape),
            len(shape) - 1,
            self._products(source, *source.users),
            self._products(source, source),
            () if self.fusing is None else cost.fused_dims(shape, self.n),
        )

    def _products(self, source: fx.Node, *nodes: fx.Node) -> float:
        """Seconds on a rank of those nodes that multiply the rows of `source`, or make them."""
        if self.fusing is None:
            return 0.0
        flops = sum(
            cost.product_flops(one)
            for one in nodes
            if one is source or cost.multiplies(one, source)
        )
        return self.machine.sheet.seconds(OperatorWork(flops / self.n, 0, value(source).dtype))

    def change_cost(self, source: fx.Node) -> Callable[[State, State], float]:
        """Seconds to move `source`'s value between two states, as the factors charge it."""
        moved = self.moved(source)
        return lambda src, dst: self.change(src, dst, moved)

    def change(self, src: State, dst: State, moved: MovedValue) -> float:
        """Seconds of one change of state; infinite where it is forbidden."""
        key = (src, dst, moved)
        if key not in self._changes:
            if src == dst:
                seconds = 0.0
            elif self._forbidden(src, dst, moved):
                seconds = np.inf
            else:
                seconds = cost.change_seconds(
                    src, dst, moved.nbytes, self.n, self.link, moved.diff, moved.outer
                )
                seconds -= self._spared(src, dst, moved)
                if _is_gather(src, dst, moved):
                    seconds += min(self._kept(moved), self._repeated(src, dst, moved))
            self._changes[key] = seconds
        return self._changes[key]

    def _spared(self, src: State, dst: State, moved: MovedValue) -> float:
        """Seconds that a change gains by being one operator with the products beside it."""
        dim = shard_dim(dst if src == P else src)
        if self.fusing is None or dim not in moved.even:
            return 0.0
        if src == P:
            product, times = moved.made, 1 + moved.diff
        elif shard_dim(dst) is None and dst != P:
            product, times = moved.read, 1 + (moved.diff and dst == R)
        else:
            return 0.0
        if not product:
            return 0.0
        whole = cost.collective_seconds("all_gather", moved.nbytes, self.n, self.link)
        return times * self.fusing.gain(whole, product)

    def gathers_again(self, source: fx.Node, src: State, dst: State) -> bool:
        """Whether a weight that is gathered in forward is gathered again in backward, which costs
        less than to keep it whole between the two."""
        moved = self.moved(source)
        if not _is_gather(src, dst, moved):
            return False
        return self._repeated(src, dst, moved) < self._kept(moved)

    def _forbidden(self, src: State, dst: State, moved: MovedValue) -> bool:
        if moved.spreads(src, dst) and not self.sequence_parallel:
            return True
        matrix = not moved.activation and moved.last > 0
        return matrix and not self.gathers_weights and _is_gather(src, dst, moved)

    def _kept(self, moved: MovedValue) -> float:
        """Seconds that a gathered value is charged which the rank keeps for backward."""
        price = self.activation_byte if moved.activation else self.parameter_byte
        return moved.nbytes * price

    def _repeated(self, src: State, dst: State, moved: MovedValue) -> float:
        """Seconds to gather a value again in backward; only weights are."""
        if moved.activation:
            return np.inf
        return cost.change_seconds(src, dst, moved.nbytes, self.n, self.link, False, moved.outer)


def _is_gather(src: State, dst: State, moved: MovedValue) -> bool:
    """Whether a change makes whole what the backward pass reads."""
    return moved.diff and shard_dim(src) is not None and shard_dim(dst) is None
