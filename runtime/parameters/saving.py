"""State dicts made whole to be saved: every rank gathers, the first one keeps and writes.

`save_pretrained` of transformers and of PEFT, called on every rank, goes this way by itself.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from autoshard.runtime import compat
from autoshard.runtime.agreement import announced, from_first
from autoshard.runtime.collectives import Axis
from autoshard.runtime.errors import AutoshardError, message
from autoshard.runtime.mesh import axes_of
from autoshard.runtime.parameters.eager import StoredTensor, gathered_axes, unsharded

_REMEDY = (
    "Call it on every rank, not under `if rank == 0`: the ranks gather together, and the first one "
    "writes."
)


def full_state_dict(
    source: nn.Module | Optimizer | Mapping[str, Any], *, rank0_only: bool = True
) -> dict[str, Any]:
    """The state dict with whole tensors on the CPU in place of stored ones, to be saved: copies,
    which the next step leaves as they are.

    source: a model, an optimizer, or a state dict of one, also inside of other containers. Every
    rank calls it; the mesh's first rank gets the state, the others an empty dict, or all the state
    with rank0_only=False. Tied parameters stay one tensor.

        state = autoshard.full_state_dict(model)
        if rank == 0:
            torch.save(state, "model.pt")
    """
    state = source.state_dict() if isinstance(source, nn.Module | Optimizer) else source
    leaves, tree = pytree.tree_flatten(dict(state))
    axes = _axes(leaves)
    keeps = not rank0_only or _is_first(axes)
    wholes: dict[Any, torch.Tensor] = {}

    def whole(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if x.layout is not torch.strided:
            return x.detach().clone()
        own = compat.local_of(x) if isinstance(x, DTensor) else x
        # by the storage, not the object: state_dict() makes two objects of a tied parameter
        at = compat.storage_key(own), own.storage_offset(), own.stride()
        key = at, x.shape, x.dtype, tuple(x.placements) if isinstance(x, DTensor) else None
        if key not in wholes:
            with torch.no_grad():
                made = unsharded(x).detach() if isinstance(x, DTensor) else x.detach()
            wholes[key] = _copied(made, own) if keeps else made.new_empty(0)
        return wholes[key]

    split = {axis for leaf in leaves if isinstance(leaf, DTensor) for axis in gathered_axes(leaf)}
    met = [axis for axis in axes if axis in split]
    with announced("gathering of a state dict", met, _REMEDY):
        leaves = [whole(leaf) for leaf in leaves]
    return pytree.tree_unflatten(leaves, tree) if keeps else {}


def _copied(whole: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """The whole on the CPU, in memory other than that of the tensor it was made of."""
    copied = whole.cpu()
    return copied.clone() if compat.same_storage(copied, own) else copied


def _axes(leaves: list[Any]) -> tuple[Axis, ...]:
    mesh = next((leaf.device_mesh for leaf in leaves if isinstance(leaf, DTensor)), None)
    return () if mesh is None else axes_of(mesh)


def _is_first(axes: tuple[Axis, ...]) -> bool:
    return all(axis.rank == 0 for axis in axes)


def save_together(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """transformers' `save_pretrained` of a model with stored parameters, called on every rank.

    The first rank runs it, with the whole state.
    """
    axes = _axes([p for p in model.parameters() if isinstance(p, StoredTensor)])
    given = inspect.signature(original).bind(model, *args, **kwargs)
    state = given.arguments.get("state_dict")
    if not axes or (state is not None and not _axes(pytree.tree_leaves(state))):
        return original(model, *args, **kwargs)  # nothing to gather
    with _together(model, axes) as attempted:
        given.arguments["state_dict"] = full_state_dict(model if state is None else state)
        if _is_first(axes):
            with attempted:
                original(*given.args, **given.kwargs)


def save_adapters_together(
    original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
) -> Any:
    """PEFT's `save_pretrained`, which each rank runs, and of which the first one writes."""
    axes = _axes([p for p in model.parameters() if isinstance(p, StoredTensor)])
    if not axes:
        return original(model, *args, **kwargs)
    given = inspect.signature(original).bind(model, *args, **kwargs)
    main = given.arguments.get("is_main_process", True)
    given.arguments["is_main_process"] = main and _is_first(axes)
    with _together(model, axes) as attempted, attempted:
        original(*given.args, **given.kwargs)


def whole_adapters(original: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """What PEFT saves, whole: its choice of the state dict, made on each rank."""
    return full_state_dict(original(*args, **kwargs), rank0_only=False)


def upload_once(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """The upload of `push_to_hub`, called on every rank: of what the first one wrote."""
    stored = model.parameters() if isinstance(model, nn.Module) else ()
    if not _is_first(_axes([p for p in stored if isinstance(p, StoredTensor)])):
        return None
    return original(model, *args, **kwargs)


class _Attempt(contextlib.AbstractContextManager[None]):
    """A write on the first rank, whose error the others raise too. error: it, once it is there."""

    error: Exception | None = None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        if isinstance(error, AutoshardError) or not isinstance(error, Exception):
            return False
        self.error = error
        return True


@contextlib.contextmanager
def _together(model: nn.Module, axes: tuple[Axis, ...]) -> Iterator[_Attempt]:
    """A `save_pretrained` that every rank begins and ends: the directory is then complete."""
    what = f"save_pretrained of {type(model).__name__}"
    attempt = _Attempt()
    with announced(what, axes, _REMEDY):
        yield attempt
    story = None if attempt.error is None else f"{type(attempt.error).__name__}: {attempt.error}"
    for axis in axes:
        story = from_first(story, f"end of {what}", axis)
    if attempt.error is not None:
        raise attempt.error
    if story is not None:
        raise AutoshardError(
            message(
                f"{what}: the first rank could not write: {story}",
                remedy="See the output of that rank.",
            )
        )
