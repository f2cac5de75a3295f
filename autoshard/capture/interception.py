"""Stop torch.compile after Dynamo's trace: the graph is used, the model is not run; and the devices
of its inputs, of its model and of its example."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autoshard.runtime import compat
from autoshard.runtime.compat import GraphInput


def device_type(inputs: Sequence[GraphInput]) -> str:
    """The device the model lives on; a model on "meta" is planned for the default device."""
    devices = {i.real.device.type for i in inputs if isinstance(i.real, torch.Tensor)} - {"meta"}
    return "cuda" if "cuda" in devices else "cpu"


def example_device(model: nn.Module, example: Any) -> str:
    """The device a model will live on: its own, or that of the example where it is on meta."""
    tensors = [*model.parameters(), *pytree.tree_leaves(example)]
    kinds = {t.device.type for t in tensors if isinstance(t, torch.Tensor)}
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
