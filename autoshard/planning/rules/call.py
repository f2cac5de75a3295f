"""A call of an operator in the serial graph, as a sharding rule sees it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoshard.planning.sizes import Size, why_not
from autoshard.planning.strategy import ImplCollective, Strategy, operands, results, value
from autoshard.runtime.collectives import I, R, State


class OpCall:
    """The arguments of a node by name, the axis size, and what a rule needs to answer.

    A rule is a callable `rule(call)` that returns the strategies it offers and tells
    `call.decline` why it does not offer others.
    """

    def __init__(self, node: fx.Node, n: int) -> None:
        assert isinstance(node.target, torch._ops.OpOverload)
        self.node = node
        self.n = n
        self.target: torch._ops.OpOverload = node.target
        self.op = str(node.target)
        self.schema: torch.FunctionSchema = node.target._schema
        self.reasons: list[str] = []
        self.operands = operands(node)
        self._arguments: dict[str, Any] = {}
        self._slots: list[str] = []
        names = [argument.name for argument in self.schema.arguments]
        bound = [*zip(names, node.args, strict=False), *node.kwargs.items()]
        for name, argument in bound:
            self._arguments[name] = argument
            found = [leaf for leaf in pytree.tree_leaves(argument) if self._is_tensor(leaf)]
            self._slots += [name] * len(found)
        for declared in self.schema.arguments:
            self._arguments.setdefault(declared.name, declared.default_value)

    @staticmethod
    def _is_tensor(leaf: Any) -> bool:
        return isinstance(leaf, fx.Node) and isinstance(value(leaf), torch.Tensor)

    def __getitem__(self, name: str) -> Any:
        """The argument as the node holds it: a Node, a number, a list, or the default."""
        return self._arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Like `call[name]`, for an argument that the operator may not have."""
        return self._arguments.get(name, default)

    def __contains__(self, name: str) -> bool:
        """Whether the operator has an argument of this name."""
        return name in self._arguments

    @property
    def result(self) -> Any:
        """The fake result: a tensor, or a tuple or list of tensors."""
        return value(self.node)

    @property
    def results(self) -> list[Any]:
        """The fake results as a list, one entry where the node produces one tensor."""
        return results(self.node)

    def tensor(self, name: str) -> torch.Tensor | None:
        """The fake value of a tensor argument; None where it is absent or a number."""
        found = self._arguments[name]
        return value(found) if self._is_tensor(found) else None

    def given(self, *names: str) -> list[torch.Tensor]:
        """The fake values of tensor arguments that are there."""
        return [value(self._arguments[name]) for name in names]

    def tensors(self, name: str) -> list[torch.Tensor]:
        """The fake values of a list of tensors, absent entries left out."""
        leaves = pytree.tree_leaves(self._arguments[name])
        return [value(leaf) for leaf in leaves if self._is_tensor(leaf)]

    def dims(self, name: str, rank: int) -> list[int]:
        """An argument that names dims, as non-negative ints; None and [] mean all of them."""
        found = self._arguments[name]
        if found is None or (isinstance(found, (list, tuple)) and not found):
            return list(range(rank))
        listed = found if isinstance(found, (list, tuple)) else [found]
        return [dim % rank if rank else 0 for dim in listed]

    def decline(self, reason: str) -> None:
        """Record why a strategy is not offered."""
        if reason not in self.reasons:
            self.reasons.append(reason)

    def fits(self, size: Size, label: str, *, even: bool = False) -> bool:
        """Whether a dim can be split over the axis; the reason is recorded where it cannot."""
        problem = why_not(size, self.n, even=even)
        if problem is not None:
            self.decline(f"{label} {problem}")
        return problem is None

    def split_dims(self, shape: Sequence[Size], *whole: int) -> Iterator[int]:
        """The dims of a shape that can be split over the axis, `whole` ones aside; the reason is
        recorded where one cannot."""
        for dim, size in enumerate(shape):
            if dim not in whole and self.fits(size, f"{self.op}: dim {dim}"):
                yield dim

    def strategy(
        self,
        states: Mapping[str, State | Sequence[State]],
        output: State | Sequence[State],
        impl: Callable[..., Any] | None = None,
        traffic: Sequence[ImplCollective] = (),
    ) -> Strategy:
        """A strategy from states by argument name; operands not named are used as R.

        Operands without a gradient (integers, masks) are I where R was said: both mean the same.
        One output state is given to every element of a tuple-valued result.
        """
        queues = {k: [s] if isinstance(s, str) else list(s) for k, s in states.items()}
        inputs = []
        for slot, operand in zip(self._slots, self.operands, strict=True):
            queue = queues.get(slot)
            state = R if queue is None else queue.pop(0)
            inputs.append(canonical(state, value(operand)))
        return Strategy(tuple(inputs), self._output(output), impl, tuple(traffic))

    def uniform(self, state: State) -> Strategy:
        """Every operand and every result in one state."""
        return self.strategy({slot: [state] * len(self.operands) for slot in self._slots}, state)

    def _output(self, output: State | Sequence[State]) -> State | tuple[State, ...]:
        result = self.result
        if not isinstance(result, (tuple, list)):
            assert isinstance(output, str)
            return canonical(output, result)
        states = [output] * len(result) if isinstance(output, str) else list(output)
        return tuple(canonical(s, v) for s, v in zip(states, result, strict=True))

    def __repr__(self) -> str:
        return f"OpCall({self.node.format_node()}, n={self.n})"


Rule = Callable[[OpCall], Iterable[Strategy]]
"""A function that offers the strategies of a call."""


def differentiable(tensor: Any) -> bool:
    """Whether a value can have a gradient, judged by its dtype."""
    return isinstance(tensor, torch.Tensor) and (
        tensor.dtype.is_floating_point or tensor.dtype.is_complex
    )


def canonical(state: State, tensor: Any) -> State:
    """R and I mean the same where there is no gradient: I stands for both."""
    return I if state == R and not differentiable(tensor) else state
