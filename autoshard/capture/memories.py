"""What autograd knows of writes, of which a functional trace knows values alone.

A memory has one value, and names: 0, and one for each `detach` of a tensor in it, which the views
of that have, too. A write goes into the value for all names, and into the gradient of the name
that wrote; in a region without gradients, into none. So `y = x.detach(); y += p` gives y the
gradient of p and leaves x its own, and `x.data.mul_(2)` leaves x the gradient that it had.

`Names` records, while a graph is traced, who reads and writes; `Versions` says it of the trace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoshard.planning import same_shape, view_chain
from autoshard.runtime import compat
from autoshard.runtime.compat import FunctionalTensor

aten = torch.ops.aten


class Slot(NamedTuple):
    """Index among the extra outputs of the trace."""

    position: int


class Write(NamedTuple):
    """The value of a written tensor, before and after. name: by which autograd sees the write; None
    where it sees none."""

    before: Slot
    after: Slot
    name: int | None


def unwrap(value: Any) -> Any:
    """The traced tensor inside a functional one, all pending mutations applied."""
    if isinstance(value, FunctionalTensor):
        return value.from_functional()
    return value


class Names:
    """The names by which tensors were read and written during a trace.

    output: makes a traced value one more output of the trace. parents: of each name, the one that
    was detached. detached: what was made by each but 0. reads: (a value that was read, its name).
    """

    def __init__(self, output: Callable[[Any], Slot]) -> None:
        self.output = output
        self.writes: list[Write] = []
        self.parents: list[int] = [0]
        self.detached: list[Slot] = []
        self.reads: list[tuple[Slot, int]] = []
        self._seen: dict[int, tuple[Any, Any]] = {}
        self._names: dict[int, int] = {}

    def read(self, operands: list[Any]) -> list[tuple[Any, Any, Any]]:
        """Look at tensors, which applies what was written to them; those that are new values since
        the last look, with both values."""
        found = []
        for operand in operands:
            now = unwrap(operand)
            seen = self._seen.get(id(operand))
            if seen is not None and seen[1] is now:
                continue
            if seen is not None:
                found.append((operand, seen[1], now))
            if name := self._names.get(id(operand)):
                self.reads.append((self.output(now), name))
            self._seen[id(operand)] = operand, now
        return found

    def write(self, operands: list[Any], is_hidden: bool) -> None:
        """Record what an operator has written to; `is_hidden`: where no gradient is recorded."""
        written: list[Any] = []
        for operand, before, after in self.read(operands):
            if any(compat.same_storage(operand, other) for other in written):
                continue  # another name or view of what was written
            written.append(operand)
            name = None if is_hidden else self._names.get(id(operand), 0)
            self.writes.append(Write(self.output(before), self.output(after), name))

    def name(self, operands: list[Any], result: Any, detaches: bool, is_hidden: bool) -> Any:
        """An operator's result, with its name. A view that is made where no gradient is recorded
        (`is_hidden`) is detached."""
        if not detaches and not is_hidden and not self._names:
            return result
        leaves, spec = pytree.tree_flatten(result)
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, FunctionalTensor) or any(leaf is x for x in operands):
                continue
            source = next((x for x in operands if compat.same_storage(leaf, x)), None)
            name = self._names.get(id(source), 0)
            if source is not None and (detaches or is_hidden):
                leaves[i] = leaf = leaf if detaches else leaf.detach()
                self.parents.append(name)
                self.detached.append(self.output(unwrap(leaf)))
                name = len(self.detached)
            if name:
                self._names[id(leaf)] = name
                self.read([leaf])
        return pytree.tree_unflatten(leaves, spec)


class Versions:
    """What a trace says of its memories, by `Names`.

    versions: of a memory after a write, what it was before, and the name that wrote (None: no
    gradient is recorded).
    """

    def __init__(self, names: Names, node_of: Callable[[Slot], Any]) -> None:
        self.versions: dict[fx.Node, tuple[fx.Node, int | None]] = {}
        for before, after, name in names.writes:
            old, new = node_of(before), node_of(after)
            while old is not new and old not in self.versions and _is_same_view(old, new):
                old, new = old.args[0], new.args[0]
            if isinstance(old, fx.Node) and isinstance(new, fx.Node) and _is_alike(old, new):
                self.versions[new] = old, name
        self._own = {node_of(slot) for slot in names.detached}
        self._names: dict[fx.Node, int] = {}
        for slot, name in names.reads:
            for view in view_chain(node_of(slot)):
                if isinstance(view, fx.Node) and view.target is aten.detach.default:
                    self._names[view], name = name, names.parents[name]
        self._last: dict[fx.Node, int] = {}

    def name(self, node: fx.Node) -> int | None:
        """By which name a detach reads a memory anew; None for the model's own, and for any other
        node. Asked of nodes in their order.

        To write to a view of a detached tensor, a trace detaches the memory once more.
        """
        if node.target is not aten.detach.default:
            return None
        source: fx.Node = node.args[0]  # type: ignore[assignment]
        if node in self._names:
            self._last[source] = self._names[node]
        return None if node in self._own else self._last.get(source)


def _is_same_view(old: Any, new: Any) -> bool:
    """Whether two values are views of the same kind of two others."""
    return (
        all(isinstance(x, fx.Node) and view_chain(x)[1:] for x in (old, new))
        and (old.target, old.args[1:], old.kwargs) == (new.target, new.args[1:], new.kwargs)
        and _is_alike(old.args[0], new.args[0])
    )


def _is_alike(old: fx.Node, new: fx.Node) -> bool:
    """Whether two values, or all elements of two, have the same shapes."""
    tensors = [pytree.tree_leaves(node.meta["val"]) for node in (old, new)]
    return len(tensors[0]) == len(tensors[1]) and all(map(same_shape, *tensors))
