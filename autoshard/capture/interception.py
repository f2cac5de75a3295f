"""Stop torch.compile after Dynamo's trace: the graph is used, the model is not run; and the devices
of its inputs, of its model and of its example.

One trace tells the graph of any batch: its own is a prime that no other size is a multiple of, so
that view(%x, [10007 * 512, 64]) is view(%x, [2 * 512, 64]) for two samples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autoshard.runtime import compat
from autoshard.runtime.compat import GraphInput
from autoshard.runtime.errors import ConfigError


def device_type(inputs: Sequence[GraphInput]) -> str:
    """The device the model lives on; a model on "meta" is planned for the default device."""
    return _device(item.real for item in inputs)


def example_device(model: nn.Module, example: Any) -> str:
    """The device a model will live on: its own, or that of the example where it is on meta."""
    return _device([*model.parameters(), *pytree.tree_leaves(example)])


def _device(values: Iterable[Any]) -> str:
    kinds = {value.device.type for value in values if isinstance(value, torch.Tensor)}
    return "cuda" if "cuda" in kinds else "cpu"


T = TypeVar("T")


class _Traced(Exception):
    """The exception that carries the result out of Dynamo: nothing is compiled, nothing runs."""

    def __init__(self, made: Any) -> None:
        self.made = made


def intercept(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    plan: Callable[[fx.GraphModule, Sequence[Any], list[compat.GraphInput]], T],
    dynamic: bool | None = None,
) -> T:
    """The result of `plan` on the graph Dynamo traces for the call; the model does not run. Sizes
    are fixed but with `dynamic`, whatever was traced before."""

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        raise _Traced(plan(gm, example_inputs, compat.graph_inputs(gm)))

    compat.trace_as_ours(backend)
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
    tensors = [*model.parameters(), *pytree.arg_tree_leaves(*args, **(kwargs or {}))]
    on_meta = any(isinstance(t, torch.Tensor) and t.is_meta for t in tensors)
    try:
        with (
            compat.meta_constants() if on_meta else contextlib.nullcontext(),
            compat.at_first_call(),
        ):
            compiled(*args, **(kwargs or {}))
    except Exception as error:
        traced = compat.backend_error(error)
        if isinstance(traced, _Traced):
            made: T = traced.made
            return made
        if traced is not None:
            raise traced from None
        raise
    raise ValueError(
        f"torch.compile did not call the backend for {type(model).__name__}: the model runs no "
        "tensor operation, or TORCHDYNAMO_DISABLE is set, or a dispatch mode is active"
    )


_MARK = 10_007
"""Samples of the batch that is traced for every other."""


def of_marked_batch(model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments with a batch whose size `of_batch` can tell; its samples are along the first
    dim of the first tensor, and of those that have as many."""
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    samples = next((t.shape[0] for t in tensors if t.dim()), 0)
    sizes = [size for t in (*tensors, *model.parameters()) for size in t.shape]
    if not samples or any(size and size % _MARK == 0 for size in sizes):
        why = f"no other batch can be made of one with no tensor, or with multiples of {_MARK}"
        raise ConfigError(why, remedy="Search with a batch of one size.")

    def many(one: Any) -> Any:
        if not isinstance(one, torch.Tensor) or not one.dim() or one.shape[0] != samples:
            return one
        return one[:1].repeat(_MARK, *[1] * (one.dim() - 1))

    return pytree.tree_map(many, args), pytree.tree_map(many, kwargs)


def of_batch(
    captured: fx.GraphModule, inputs: list[GraphInput], samples: int | None
) -> tuple[fx.GraphModule, list[GraphInput]]:
    """A captured graph of a marked batch, and its inputs, with so many samples; None: as it is."""
    if samples is None:
        return captured, inputs

    def sized(one: Any) -> Any:
        if type(one) is int and one % _MARK == 0:
            return one // _MARK * samples
        if isinstance(one, torch.Tensor):
            shape, stride = (tuple(map(sized, each)) for each in (one.shape, one.stride()))
            if shape != one.shape or stride != one.stride():
                key = shape, stride, one.dtype, one.device, one.requires_grad
                if key not in values:  # equal layers share them
                    values[key] = one.new_empty_strided(
                        shape, stride, requires_grad=one.requires_grad
                    )
                return values[key]
        return one

    graph, made, values = fx.Graph(), dict[fx.Node, fx.Node](), dict[Any, torch.Tensor]()
    for node in captured.graph.nodes:
        new = made[node] = graph.node_copy(node, made.__getitem__)
        new.args, new.kwargs = fx.node.map_aggregate((new.args, new.kwargs), sized)
        if "val" in node.meta:
            new.meta["val"] = pytree.tree_map(sized, node.meta["val"])
    found = compat.without_code(captured, graph)
    found.meta = dict(captured.meta)
    reals = [one.real for one in inputs]
    few = [x if x is None or x.shape[:1] != (_MARK,) else x[:samples] for x in reals]
    return found, [replace(one, real=real) for one, real in zip(inputs, few)]
