"""The rule oracle: runs a strategy on shards and compares it with the dense operator.

Inputs are split as the strategy says, the operator (or the strategy's own implementation) runs on
every rank in lockstep threads, and the parts are put together again. The output and the gradient
of every input must be those of the operator on whole tensors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoshard.planning.rules.registry import strategies
from autoshard.planning.rules.views import size_entry
from autoshard.planning.strategy import Strategy
from autoshard.runtime.collectives.axis import Axis, chunk_bounds
from autoshard.runtime.collectives.lockstep import run_ranks
from autoshard.runtime.collectives.states import (
    I,
    P,
    State,
    forward_value,
    gradient_value,
    shard_dim,
)


class Sample(NamedTuple):
    """One call of an operator: `op` is "aten.linear" or "aten.add.Tensor"; tensors in `args`.

    constant: positions, among the tensors, of those the operator has no gradient for.
    random: whether the call draws random numbers; nothing but I may then be offered.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = {}
    n: tuple[int, ...] = (2,)
    constant: tuple[int, ...] = ()
    random: bool = False

    @property
    def overload(self) -> torch._ops.OpOverload:
        namespace, packet, *overload = self.op.split(".")
        found = getattr(getattr(torch.ops, namespace), packet)
        return getattr(found, overload[0] if overload else found.overloads()[0])


def node_of(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[fx.Node, list[Any]]:
    """A graph node that calls `op`, its tensors being placeholders; and those tensors."""
    graph = fx.Graph()
    tensors: list[torch.Tensor] = []

    def placeholder(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        node = graph.placeholder(f"x{len(tensors)}")
        node.meta["val"] = leaf
        tensors.append(leaf)
        return node

    node_args, node_kwargs = pytree.tree_map(placeholder, (args, kwargs))
    node = graph.call_function(op, node_args, node_kwargs)
    node.meta["val"] = op(*args, **kwargs)
    return node, tensors


def split(x: torch.Tensor, kind: State, n: int, generator: torch.Generator) -> list[torch.Tensor]:
    """The n local values of `x` where it is I, P (random parts that sum to it) or S(d)."""
    dim = shard_dim(kind)
    if dim is not None:
        spans = [chunk_bounds(x.shape[dim], Axis("tp", n, rank, "")) for rank in range(n)]
        return [x.narrow(dim, *span).clone() for span in spans]
    if kind == I:
        return [x.clone() for _ in range(n)]
    shape = (n - 1, *x.shape)
    parts = list(torch.randn(shape, generator=generator, dtype=torch.float64).to(x.dtype))
    return [*parts, x - sum(parts)]


def join(parts: list[torch.Tensor], kind: State, what: str) -> torch.Tensor:
    """The whole value from its parts; for I every rank must hold the same."""
    dim = shard_dim(kind)
    if dim is not None:
        return torch.cat(parts, dim)
    if kind == P:
        return torch.stack(parts).sum(0)
    for part in parts[1:]:
        close(part, parts[0], f"{what} differs between ranks")
    return parts[0]


def close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Equal to 1e-9 in float64 (1e-4 in fp32); integers equal. Raises AssertionError."""
    tolerance = 1e-9 if expected.dtype == torch.float64 else 1e-4
    if not expected.is_floating_point():
        tolerance = 0
    torch.testing.assert_close(
        found,
        expected,
        rtol=tolerance,
        atol=tolerance,
        equal_nan=True,
        msg=lambda text: f"{what}: {text}",
    )


def _tensors(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _differentiated(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor], grads: list[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    pairs = [(o, g) for o, g in zip(outputs, grads) if o.requires_grad]
    wanted = [x for x in inputs if x.requires_grad]
    if not pairs or not wanted:
        return [None] * len(inputs)
    found = iter(
        torch.autograd.grad(
            [o for o, _ in pairs], wanted, [g for _, g in pairs], materialize_grads=True
        )
    )
    return [next(found) if x.requires_grad else None for x in inputs]


def check(
    node: fx.Node,
    tensors: list[torch.Tensor],
    strategy: Strategy,
    n: int,
    constant: tuple[int, ...] = (),
) -> None:
    """Raise AssertionError where the strategy's output or an input's gradient is wrong."""
    generator = torch.Generator().manual_seed(0)
    leaves, spec = pytree.tree_flatten((tuple(node.args), dict(node.kwargs)))
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, fx.Node)]
    assert len(at) == len(tensors) == len(strategy.inputs)

    def call(function: Any, values: list[torch.Tensor], change: Any = lambda args: args) -> Any:
        filled = list(leaves)
        for i, x in zip(at, values):
            filled[i] = x
        args, kwargs = pytree.tree_unflatten(filled, spec)
        return _tensors(function(*change(args), **kwargs))

    def leaves_of(values: list[torch.Tensor]) -> list[torch.Tensor]:
        return [
            x.detach().clone().requires_grad_(x.is_floating_point() and i not in constant)
            for i, x in enumerate(values)
        ]

    whole = leaves_of(tensors)
    expected = call(node.target, whole)
    grads = [
        torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.dtype)
        if o.is_floating_point()
        else None
        for o in expected
    ]
    expected_grads = _differentiated(expected, whole, grads)

    states = strategy.output
    outputs = [states] * len(expected) if isinstance(states, str) else list(states)
    assert len(outputs) == len(expected)
    local_inputs = [
        split(x.detach(), forward_value(s), n, generator) for x, s in zip(whole, strategy.inputs)
    ]
    local_grads = [
        [None] * n if g is None else split(g, gradient_value(s), n, generator)
        for g, s in zip(grads, outputs)
    ]

    def rank(axis: Axis) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        values = leaves_of([parts[axis.rank] for parts in local_inputs])
        if strategy.impl is None:
            found = call(node.target, values, lambda args: _localized(node, args, outputs, axis))
        else:
            impl = strategy.impl
            found = call(lambda *a, **k: impl(*a, **k, axis=axis), values)
        return found, _differentiated(found, values, [g[axis.rank] for g in local_grads])

    ranks = run_ranks(n, rank)
    for i, (state, o) in enumerate(zip(outputs, expected)):
        what = f"result {i}, {state}"
        parts = [found[i].detach() for found, _ in ranks]
        assert all(part.dtype == o.dtype for part in parts), what
        close(join(parts, forward_value(state), what), o.detach(), what)
    for i, (state, g) in enumerate(zip(strategy.inputs, expected_grads)):
        if g is not None:
            what = f"gradient of input {i}, {state}"
            parts = [
                torch.zeros_like(local_inputs[i][r]) if local[i] is None else local[i]
                for r, (_, local) in enumerate(ranks)
            ]
            close(join(parts, gradient_value(state), what), g, what)


def _localized(node: fx.Node, args: tuple[Any, ...], outputs: list[State], axis: Axis) -> Any:
    dim = shard_dim(outputs[0])
    entry = None if dim is None else size_entry(node, dim)
    if entry is None or dim is None:
        return args
    position, element = entry
    sizes = list(args[position])
    if sizes[element] != -1:
        sizes[element] = chunk_bounds(node.meta["val"].shape[dim], axis)[1]
    return (*args[:position], sizes, *args[position + 1 :])


def prove(sample: Sample) -> int:
    """Check every strategy offered for the sample; the number of strategies proved."""
    proved = 0
    for n in sample.n:
        node, tensors = node_of(sample.overload, sample.args, sample.kwargs)
        offered, _ = strategies(node, n)
        if sample.random:
            assert [s.output for s in offered] == [I], f"{sample.op} draws: {offered}"
            continue
        for strategy in offered:
            try:
                check(node, tensors, strategy, n, sample.constant)
            except Exception as error:
                raise AssertionError(f"{sample.op}, n={n}, {strategy}: {error}") from error
            proved += 1
    return proved
