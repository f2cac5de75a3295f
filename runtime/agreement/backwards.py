"""The backwards of data-parallel ranks, which may have taken other branches before.

At the first reduction of a backward over an axis its ranks compare the graphs whose gradients this
backward reduces, which autograd's engine knows by then, by eight bytes. Where they are the same,
the graphs reduce as compiled. Where not, their collectives would not meet:

- on dp_replicate no graph reduces in this backward. At its end all ranks reduce the gradients of
  all parameters that one of them has used, in the order in which they were stored; zeros are those
  of a rank that has not, as in DistributedDataParallel with find_unused_parameters.
- on the other axes all raise. There forwards gather, and are compared before (`history`).
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autoshard.runtime import compat
from autoshard.runtime.agreement.consensus import agree, ask, members
from autoshard.runtime.agreement.history import Call, History, mixed, name_of
from autoshard.runtime.agreement.regions import BRANCHES, CollectiveRegion, with_processes
from autoshard.runtime.agreement.store_exchange import StoreExchange
from autoshard.runtime.agreement.worlds import current_exchange
from autoshard.runtime.collectives import Axis
from autoshard.runtime.errors import AutoshardError, CollectiveError

REPLICAS = "dp_replicate"
_PLACE = "_autoshard_place"
_BUCKET = 4_000_000  # elements that the end of a backward reduces at once

_Unreduced = tuple[Any, Any]  # a parameter, and the gradient that it had before: DTensors


class _Stored(NamedTuple):
    """A stored parameter, and the names of the groups of its mesh."""

    parameter: weakref.ref[Any]
    groups: frozenset[str]


class _Backwards:
    """The backwards of this rank on one axis.

    stored: parameters in the order of storage, which all ranks share; one that is gone keeps its
    place. held: the gradients that were there before a backward in which no graph reduces.
    """

    def __init__(self, axis: Axis, history: History, stored: Sequence[_Stored]) -> None:
        self.axis = axis
        self._history, self._stored = history, stored
        self._region = CollectiveRegion(f"a backward on {axis.name}", [axis])
        self._group = compat.process_group(axis.group)
        self._own_sums = compat.OwnSums(axis.rank, axis.size)
        # in the order of the forwards; a node is gone when no backward can reach it. Without a
        # call: of one parameter, which eager code has read
        self._nodes: weakref.WeakKeyDictionary[Any, Call | None] = weakref.WeakKeyDictionary()
        self._since: list[bool] = []  # the last backward: whether a forward was compared
        self._end: weakref.ref[Callable[[], None]] | None = None
        self._held: dict[int, Any] | None = None

    def record(self, node: Any, call: Call | None, compared: bool) -> None:
        """Record a node of autograd whose backward is going to reduce over the axis."""
        self._nodes[node] = call
        self._since.append(compared)

    @contextlib.contextmanager
    def reducing(self) -> Iterator[None]:
        """Collectives of a backward run as the ranks have chosen at the first."""
        if self._end is None or self._end() is None:  # the engine drops it where a backward fails
            self._begin()
        if self._held is None:
            yield
            return
        compat.replace_group(self.axis.group, self._own_sums)
        try:
            yield
        except RuntimeError as error:
            if "No backend type" not in str(error):
                raise
            raise _refusal("options['precision'] with 'accumulate' sums them in parts") from error
        finally:
            compat.replace_group(self.axis.group, self._group)

    def _begin(self) -> None:
        def end() -> None:
            self._finish()

        compat.after_backward(end)
        self._end, self._held = weakref.ref(end), None
        if self._since == [True]:  # the one graph's forward was compared
            return
        running = [one for one in self._nodes.items() if compat.will_run(one[0])]
        calls = [call or _read_of(node) for node, call in running]
        number = functools.reduce(mixed, (call.number for call in calls), 0)
        with self._region:
            same = ask(number, self.axis)
        if not same and self.axis.name == REPLICAS:
            self._held = self._hold()
        elif not same:
            what, lines = "graphs whose gradients a backward reduces", [c.line for c in calls]
            agree(what, f"{number:x}", lines, self.axis, error=CollectiveError, remedy=BRANCHES)

    def _finish(self) -> None:
        self._end = None
        if self._held is not None:
            held, self._held = self._held, None
            self._reduce(held)
        self._since.clear()
        self._history.after_backward()

    def _hold(self) -> dict[int, Any]:
        """The gradients of stored parameters, by place, which are put by: those to come are the
        rank's own."""
        with compat.plain_attributes():
            trained = dict(self._trained())
            read = [p for p in compat.leaves(self._nodes) if isinstance(p, DTensor)]
            if any(compat.has_accumulated_hooks(p) for p in trained.values()):
                raise _refusal("a hook of register_post_accumulate_grad_hook reads them before")
            if torch.is_grad_enabled():
                raise _refusal("create_graph=True differentiates them before")
            if any(trained.get(p.__dict__.get(_PLACE, -1)) is not p for p in read):
                raise _refusal("a parameter among them is a copy (copy.deepcopy) of a stored one")
            held = {i: p.grad for i, p in trained.items()}
            for p in trained.values():
                p.grad = None
        return held

    def _trained(self) -> Iterator[tuple[int, Any]]:
        for i, one in enumerate(self._stored):
            parameter = one.parameter() if self.axis.group in one.groups else None
            if parameter is not None and parameter.requires_grad:
                yield i, parameter

    def _reduce(self, held: Mapping[int, Any]) -> None:
        """Sum the gradients of all parameters that a rank has used, and add them to `held`."""
        with torch.no_grad(), compat.plain_attributes(), self._region:
            trained = {i: p for i, p in self._trained() if i in held}
            used = [i in trained and trained[i].grad is not None for i in range(len(self._stored))]
            if not any(used):
                raise _refusal("torch.autograd.grad returns them before")
            marks = torch.tensor(used, dtype=torch.uint8, device="cpu")
            dist.all_reduce(marks, dist.ReduceOp.MAX, group=compat.host_group(self.axis.group))
            anywhere = marks.tolist()
            for i, parameter in trained.items():
                if not anywhere[i]:
                    parameter.grad = held[i]
            for bucket in _buckets([(p, held[i]) for i, p in trained.items() if anywhere[i]]):
                self._reduce_bucket(bucket)

    def _reduce_bucket(self, bucket: Sequence[_Unreduced]) -> None:
        """Sum the gradients of parameters of one dtype, and add them to those put by."""
        own: list[Any] = [torch.zeros_like(p) if p.grad is None else p.grad for p, _ in bucket]
        parts = [compat.local_of(grad) for grad in own]
        flat = torch.cat([part.reshape(-1) for part in parts])
        dist.all_reduce(torch.view_as_real(flat) if flat.is_complex() else flat, group=self._group)
        totals = flat.split([part.numel() for part in parts])
        for (parameter, before), part, total in zip(bucket, parts, totals):
            if before is None:
                parameter.grad = compat.dtensor_like(parameter, total.view(part.shape))
            else:
                compat.local_of(before).add_(total.view(part.shape))
                parameter.grad = before


def _buckets(held: Iterable[_Unreduced]) -> Iterator[list[_Unreduced]]:
    """Runs of one dtype, of `_BUCKET` elements at least but for the last."""
    bucket: list[_Unreduced] = []
    size = 0
    for each in held:
        if bucket and (size >= _BUCKET or bucket[0][0].dtype != each[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(each)
        size += compat.local_of(each[0]).numel()
    if bucket:
        yield bucket


def _refusal(why: str) -> AutoshardError:
    return AutoshardError(
        f"ranks of {REPLICAS} took other branches, so that their gradients are reduced at the "
        f"end of the backward, and {why}",
        remedy=BRANCHES,
    )


def _read_of(node: Any) -> Call:
    """What eager code has read, by the node that it left."""
    leaf = compat.first_leaf(node)
    if leaf is None:
        return Call("read of a value computed of stored parameters", ())
    return Call(f"read of stored parameter {leaf.__dict__.get(_PLACE)} of {tuple(leaf.shape)}", ())


class _World:
    """What this rank has stored in one world, and its backwards, by the name of the axis' group."""

    def __init__(self, exchange: StoreExchange) -> None:
        self.stored: list[_Stored] = []
        self._histories = exchange.histories
        self._axes: dict[str, _Backwards] = {}

    def on(self, axis: Axis) -> _Backwards:
        """The backwards of this rank on the axis."""
        if axis.group not in self._axes:
            history = self._histories[name_of(members(axis))]
            self._axes[axis.group] = _Backwards(axis, history, self.stored)
        return self._axes[axis.group]


_worlds: weakref.WeakKeyDictionary[StoreExchange, _World] = weakref.WeakKeyDictionary()


def _world() -> _World | None:
    exchange = current_exchange()
    if exchange is not None and exchange not in _worlds:
        _worlds[exchange] = _World(exchange)
    return None if exchange is None else _worlds[exchange]


def count_stored(parameter: torch.Tensor, axes: Iterable[Axis]) -> None:
    """Give a parameter that is stored on these axes its place in the order of reductions."""
    if (world := _world()) is not None:
        parameter.__dict__[_PLACE] = len(world.stored)
        groups = frozenset(axis.group for axis in axes)
        world.stored.append(_Stored(weakref.ref(parameter), groups))


def will_reduce(
    node: Any, axes: Iterable[Axis], call: Call | None = None, compared: bool = False
) -> None:
    """Record a node of autograd, new, whose backward is going to reduce gradients over data axes.

    call: the graph whose backward it is; None: it is of one stored parameter. compared: whether
    the ranks have compared its forward.
    """
    axes = with_processes(axes)
    if axes and (world := _world()) is not None:
        for axis in axes:
            world.on(axis).record(node, call, compared)


@contextlib.contextmanager
def reducing(axes: Iterable[Axis]) -> Iterator[None]:
    """The collectives of one node's backward, which reduce gradients over data axes.

    At the first of a backward over an axis its ranks compare what the backward reduces. Raises
    CollectiveError on all of them where that differs and the axis is not dp_replicate.
    """
    axes = with_processes(axes)
    world = _world() if axes else None
    with contextlib.ExitStack() as entered:
        if world is not None:
            for axis in axes:
                entered.enter_context(world.on(axis).reducing())
        yield
