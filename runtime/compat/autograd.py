"""Leaves, their hooks and the nodes of autograd's graph: private parts of torch's autograd."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from autoshard.runtime.errors import AutoshardError


def in_backward() -> bool:
    """Whether this thread runs autograd's backward now; nothing public says so."""
    return torch._C._current_graph_task_id() != -1


def after_backward(callback: Callable[[], None]) -> None:
    """Have the engine call `callback` at the end of the backward that this thread is in; where that
    fails, it forgets it. DistributedDataParallel reduces its last gradients so."""
    engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
    engine.queue_callback(callback)


def will_run(node: Any) -> bool:
    """Whether the backward that runs now executes a node, which is no leaf's. The engine does not
    count the root, which is the first that it runs."""
    return node is torch._C._current_autograd_node() or torch._C._will_engine_execute_node(node)


def first_leaf(node: Any) -> Any:
    """The leaf that a node's first input is made of, by functions with an output an input; None
    where there is none."""
    at = 0
    while node is not None and not isinstance(node, AccumulateGrad):
        edges = node.next_functions
        node, at = edges[at if at < len(edges) else 0] if edges else (None, 0)
    return None if node is None else node.variable


def leaves(nodes: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The leaves that the backwards of nodes would give a gradient."""
    waiting, seen = list(nodes), set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, AccumulateGrad):
            yield node.variable
        waiting += [edge[0] for edge in node.next_functions]


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply` without the search for dead wrappers of torch.func among the arguments."""
    if transforming():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def transforming() -> bool:
    """Whether a transform of torch.func, or autograd.grad with is_grads_batched, runs now."""
    return torch._C._are_functorch_transforms_active()


def in_transform(tensor: torch.Tensor) -> bool:
    """Whether a transform of torch.func has wrapped a tensor; nothing public says so."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def in_one_batch(tensor: torch.Tensor) -> bool:
    """Whether a gradient is several, of autograd.grad with is_grads_batched; nothing public says
    so."""
    return torch._C._functorch.is_legacy_batchedtensor(tensor)


def outside_transforms() -> AbstractContextManager[Any]:
    """Inside, operators run as if no transform of torch.func were active, and so on values that
    belong to none: autograd around the transforms records them, the transforms see constants."""
    return temporarily_clear_interpreter_stack() if transforming() else contextlib.nullcontext()


AccumulateGrad: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
"""The class of the autograd nodes that write a leaf's `.grad`."""


def only_stores(node: Any, leaf: torch.Tensor) -> bool:
    """Whether the backward that runs now is going to execute a leaf's node, and calls no hook.

    `backward(inputs=...)` leaves others out. Under `autograd.grad` the engine refuses the question:
    there the gradient is handed to the caller, and nothing is stored. There is no public way to
    list hooks.
    """
    if leaf._backward_hooks or leaf._post_accumulate_grad_hooks:  # type: ignore[attr-defined]
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return False


def is_in_a_graph(leaf: torch.Tensor) -> bool:
    """Whether a graph of autograd waits to hand a leaf its gradient; nothing says so in public."""
    return leaf._use_count() > 1  # type: ignore[attr-defined, no-any-return]


def move_hooks(old: torch.Tensor, new: torch.Tensor) -> None:
    """Give `new` the hooks registered on the leaf `old`, so that their handles still remove them.

    There is no public way to list hooks; a handle keeps a reference to these very dicts.
    """
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(old, name, None)
        if hooks:
            setattr(new, name, hooks)


def has_accumulated_hooks(leaf: torch.Tensor) -> bool:
    """Whether a leaf has hooks of `register_post_accumulate_grad_hook`; there is no public list."""
    return bool(leaf._post_accumulate_grad_hooks)  # type: ignore[attr-defined]


def drop_accumulated_hooks(leaf: torch.Tensor) -> None:
    """Forget the hooks that `register_post_accumulate_grad_hook` put on a leaf; `move_hooks` has
    given another one the same dict."""
    leaf._post_accumulate_grad_hooks = None  # type: ignore[attr-defined, assignment]


def compiled_node(outputs: Any) -> Any:
    """The node of the AOTAutograd graph that made `outputs`; None where none of them is of one that
    records a backward."""
    for output in outputs if isinstance(outputs, (tuple, list)) else (outputs,):
        node = getattr(output, "grad_fn", None)
        # an output that is a view of another has its own node before the graph's
        for _ in range(3):
            if hasattr(getattr(type(node), "_forward_cls", None), "compiled_bw"):
                return node
            node = next((n for n, _ in getattr(node, "next_functions", ())), None)
    return None


def around_backward(
    node: Any, region: Callable[[], AbstractContextManager[None]], refusal: str
) -> None:
    """Have the backward of an AOTAutograd graph, whose node `node` is, run inside `region()`, now
    and later.

    Nobody is called when a backward raises. The engine calls the function that the class of the
    graph's node names; AOTAutograd makes one such class a graph. Its gradients cannot be
    differentiated: whoever does gets `refusal`, and not AOTAutograd's error, which has no remedy.
    """
    function: Any = type(node)._forward_cls
    theirs = function.backward

    def refuse(_: Any) -> None:
        raise AutoshardError(refusal)

    def backward(*args: Any) -> Any:
        with region():
            try:
                grads = theirs(*args)
            except RuntimeError as error:  # its memory is used again
                if torch.is_grad_enabled() and "create_graph" in str(error):
                    raise AutoshardError(refusal) from error
                raise
        if torch.is_grad_enabled():
            for made in {g.grad_fn for g in grads if hasattr(g, "grad_fn")}:
                if made is not None:
                    made.register_prehook(refuse)
        return grads

    function.backward = staticmethod(backward)
