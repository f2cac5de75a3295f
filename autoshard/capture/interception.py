"""Stop torch.compile after Dynamo's trace: the graph is used, the model is not run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autoshard.runtime import compat

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
    """The result of `plan` on the graph Dynamo traces for the call; the model does not run."""

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        raise _Traced(plan(gm, example_inputs, compat.graph_inputs(gm)))

    compat.trace_as_ours(backend)
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
    tensors = [*model.parameters(), *pytree.arg_tree_leaves(*args, **(kwargs or {}))]
    on_meta = any(isinstance(t, torch.Tensor) and t.is_meta for t in tensors)
    try:
        with compat.meta_constants() if on_meta else contextlib.nullcontext():
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
