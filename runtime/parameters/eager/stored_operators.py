"""Operators of eager code on stored tensors: which work on the parts, which on the whole.

    elementwise, alike placed         on the parts: an optimizer's step, `p.data.mul_(2)`
    sum, norm and the like            on the parts, then a reduction
    random numbers                    drawn whole on the mesh's first rank, then cut
    another write                     on the whole, then cut: `p[0] = 1`, `p.copy_(x.T)`
    everything else                   on the whole; the result is a plain tensor

The whole is made by `unshard_parameter`, differentiable, so that gradients along data-parallel
axes are reduced in eager code as they are in a graph.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autoshard.runtime import compat
from autoshard.runtime.errors import AutoshardError
from autoshard.runtime.parameters.eager import operator_names as names
from autoshard.runtime.parameters.eager.foreach_operators import apply_to_lists
from autoshard.runtime.parameters.eager.gathering import is_partial, resolved, unsharded
from autoshard.runtime.parameters.eager.reductions import norms, stacked, unscaled
from autoshard.runtime.parameters.eager.whole_views import keep_views
from autoshard.runtime.parameters.layout import (
    from_first_rank,
    home_of,
    is_even,
    like,
    part_like,
    write_whole,
)
from autoshard.runtime.parameters.record import copy_record, policy_of


def apply(cls: type[DTensor], func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of `func`, one of whose operands is of `cls`, the class of stored tensors."""
    name = names.name_of(func)
    if name == "__get__":
        if func.__self__.__name__ in names.VIEW_ATTRIBUTES:
            return _on_whole(cls, func, args, kwargs)
        return native(cls, func, args, kwargs)
    if name == "__set__":
        return _set(cls, func, *args)
    private = name[0] == "_" != name[1] and isinstance(func, types.MethodDescriptorType)
    # private: such as `_is_view`, which Dynamo asks
    if name in names.FREE or private:
        return native(cls, func, args, kwargs)
    if name == "_foreach_norm":
        return norms(cls, func, *args, **kwargs)
    if name == "_amp_foreach_non_finite_check_and_unscale_":
        return unscaled(cls, func, *args, **kwargs)
    if name.startswith(("_foreach_", "_fused_")):
        return apply_to_lists(cls, func, args, kwargs)
    if kwargs.get("out") is not None:
        return _into(cls, func, args, dict(kwargs))
    op, writes = names.operator(name)
    if writes and args and isinstance(args[0], torch.Tensor):
        if type(args[0]) is not cls:
            return _on_whole(cls, func, args, kwargs)
        resolved(args[0])
    found = NotImplemented
    if op in names.ELEMENTWISE and (args or not writes):
        found = _on_parts(cls, func, op, writes, args, kwargs)
    elif op in names.REDUCTIONS and not writes:
        found = _reduced(cls, func, op, args, kwargs)
    elif op == "stack" and not writes:
        found = stacked(cls, args, kwargs)
    if found is not NotImplemented:
        return found
    if writes:
        return _write(cls, func, op, args, kwargs)
    if op in names.DRAWS_LIKE:
        return _draw_like(func, args, kwargs)
    if op in names.NEW and type(args[0]) is cls:
        return func(compat.local_of(args[0]), *args[1:], **kwargs)
    if op in names.SHAPE_ONLY and len(args) > 1 and type(args[1]) is cls:
        args = (args[0], compat.local_of(args[1]).new_empty(()).expand(args[1].shape))
        return func(*args)
    if op == "cpu":  # to be written to a file, by one process perhaps
        return func(unsharded(args[0]))
    if op in names.MEMORY:
        return func(_kept_whole(args[0]))
    return _on_whole(cls, func, args, kwargs)


def apply_in_transform(
    cls: type[DTensor], func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """As `apply`, inside of a transform of torch.func, to which stored tensors are constants."""
    tensors = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
    if not any(map(compat.in_transform, tensors)):
        with compat.outside_transforms():
            return apply(cls, func, args, kwargs)
    if type(args[0]) is cls and (names.operator(func.__name__).writes or "out" in kwargs):
        raise AutoshardError(
            f"{func.__name__} of a stored tensor of shape {tuple(args[0].shape)} writes a "
            "value that a transform of torch.func maps or differentiates",
            remedy="Return the value from the function, and write it outside.",
        )
    return _on_whole(cls, func, args, kwargs)


def apply_in_trace(
    cls: type[DTensor], func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """As `apply`, in a graph that any compiler traces: an optimizer's step, say.

    What cannot be in a graph breaks it, and eager code does it.
    """
    name = names.name_of(func)
    stored = [a for a in pytree.tree_leaves((args, kwargs)) if type(a) is cls]
    traced = (compat.FakeTensor, compat.FunctionalTensor)
    asks = name in names.MEMORY or (
        name in ("__get__", "__set__") and func.__self__.__name__ not in names.VIEW_ATTRIBUTES
    )
    if asks or not any(isinstance(compat.local_of(a), traced) for a in stored):
        return native(cls, func, args, kwargs)  # what a compiler asks of a tensor
    free = name == "detach" or name in names.FREE or name[0] == "_" != name[1]
    if not free and torch.is_grad_enabled() and any(a.requires_grad for a in stored):
        # whose policy says how gradients are reduced, and which no fake has
        raise NotImplementedError(f"{name} of a stored tensor that needs a gradient")
    return apply(cls, func, args, kwargs)


def _kept_whole(x: DTensor) -> torch.Tensor:
    """The whole for those who read memory by its address (safetensors does): alive as long as `x`,
    and the same until `x` is written to."""
    version = compat.version_of(x)
    if x.__dict__.get("_whole", (None,))[0] != version:
        with torch.no_grad():
            x.__dict__["_whole"] = version, unsharded(x).detach()
    whole: torch.Tensor = x.__dict__["_whole"][1]
    return whole


def assign(x: DTensor, value: torch.Tensor) -> None:
    """`x.data = value`: new storage for `x`, of the part where `value` is whole.

    Not a copy into the old storage, which another tensor may have been told to keep: the values of
    before, to be set back after an evaluation of averaged ones.
    """
    resolved(x)
    with compat.plain_attributes(), torch.no_grad():
        new = value.detach()
        if not isinstance(new, DTensor):
            new = part_like(new, x)
        elif tuple(new.placements) != tuple(x.placements):
            new = part_like(unsharded(new), x)
        compat.set_stored(x, new)


def native(cls: type[DTensor], func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """DTensor's own result, its DTensors of our class."""
    with compat.plain_attributes():
        out = func(*args, **kwargs)
    if type(out) is DTensor:
        out.__class__ = cls
    elif type(out) in (tuple, list):  # of autograd.grad, of `_foreach_norm`
        for each in out:
            if type(each) is DTensor:
                each.__class__ = cls
    return out


def _set(cls: type[DTensor], func: Any, owner: torch.Tensor, value: Any) -> None:
    if func.__self__.__name__ == "grad" and isinstance(value, torch.Tensor):
        if type(owner) is cls and not isinstance(value, DTensor):
            value = part_like(value, owner)
        elif type(owner) is not cls and isinstance(value, DTensor):
            value = unsharded(value)
    with compat.plain_attributes():
        func(owner, value)


def _on_parts(
    cls: type[DTensor],
    func: Any,
    op: str,
    writes: bool,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """An elementwise operator on the parts, or NotImplemented where they do not suffice."""
    first = args[0] if writes else next((a for a in args if type(a) is cls), None)
    if first is None:
        return NotImplemented
    if is_partial(first):  # on the device where it is, it goes on waiting
        own = compat.local_of(first)
        moved = func(own, *args[1:], **kwargs) if op == "to" else None
        return first if moved is own else NotImplemented
    spec, own = compat.spec_of(first), compat.local_of(first)
    local: list[Any] = []
    grad, needs = torch.is_grad_enabled(), False
    with compat.plain_attributes():
        for a in args:
            if type(a) is cls:
                if compat.spec_of(a) is not spec and not _alike(compat.spec_of(a), spec):
                    return NotImplemented
                needs = needs or (grad and a.requires_grad)
                local.append(compat.local_of(a))
            elif isinstance(a, torch.Tensor):
                if a.dim() == 0 < len(spec.shape) and not isinstance(a, DTensor):
                    local.append(a)
                elif writes and a.shape == spec.shape and not isinstance(a, DTensor):
                    local.append(compat.local_of(part_like(a, first)))
                else:
                    return NotImplemented
                needs = needs or (grad and a.requires_grad)
            else:
                local.append(a)
        if any(isinstance(a, torch.Tensor) for a in kwargs.values()):
            return NotImplemented
        if needs and op != "detach":
            if any(isinstance(a, torch.Tensor) and not isinstance(a, DTensor) for a in args):
                return NotImplemented
            return _recorded(cls, func, first, args, kwargs)
        out = func(*local, **kwargs)
        if writes:
            increment_version(first)
            return first
        if out is own:
            return first
        if not isinstance(out, torch.Tensor):
            return out
        if out.device != own.device or out.shape != own.shape:
            return NotImplemented
        return like(first, out)


def _alike(a: Any, b: Any) -> bool:
    return a.shape == b.shape and a.placements == b.placements and a.mesh == b.mesh


def _recorded(
    cls: type[DTensor], func: Any, first: DTensor, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """DTensor's own differentiable operator."""
    out = native(cls, func, args, kwargs)
    if type(out) is cls and out is not first:
        copy_record(first, out)
    return out


_SUMS = ("sum", "norm", "linalg_vector_norm")  # to which a rank without rows adds nothing


def _reduced(
    cls: type[DTensor], func: Any, op: str, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """A reduction of all elements: plain, or a sum that waits to be reduced with others."""
    x = args[0] if args else None
    order = args[1:] if op in ("norm", "linalg_vector_norm") else ()
    whole = kwargs.get("dim") is None and len(args) == 1 + len(order) and len(order) < 2
    numbers = all(isinstance(n, (int, float)) and 0 < abs(n) < float("inf") for n in order)
    if type(x) is not cls or is_partial(x) or not (whole and numbers):
        return NotImplemented
    graded = torch.is_grad_enabled() and x.requires_grad  # which DTensor cuts into even parts
    if not is_even(x) and (graded or home_of(x) is None or op not in _SUMS):
        return NotImplemented
    try:
        out = _recorded(cls, func, x, args, kwargs)
    except (NotImplementedError, RuntimeError):  # what DTensor has no rule for, on every rank
        return NotImplemented
    if type(out) is not cls:
        return out
    with compat.plain_attributes():
        wait = is_partial(out) and not out.requires_grad and not compat.compiling()
    return out if wait else unsharded(out)


def _drawn(whole: torch.Tensor, x: DTensor) -> torch.Tensor:
    """The values of the mesh's first rank."""
    if compat.compiling():
        raise NotImplementedError(f"random numbers of a stored tensor of shape {tuple(x.shape)}")
    return from_first_rank(whole, x.device_mesh)


def _into(cls: type[DTensor], func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`func(..., out=x)`: the result, copied into `x`, as it is drawn on the mesh's first rank."""
    target = kwargs.pop("out")
    found = func(*args, **kwargs)
    with torch.no_grad():
        for to, value in zip(*([t] if isinstance(t, torch.Tensor) else t for t in (target, found))):
            if type(to) is cls and not isinstance(value, DTensor):
                value = _drawn(value.detach(), to)
            to.copy_(value)
    return target


def _write(
    cls: type[DTensor], func: Any, op: str, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """A write to a stored tensor by way of its whole."""
    flat, tree = pytree.tree_flatten((args, kwargs))
    target = next(a for a in flat if type(a) is cls)
    with compat.plain_attributes():
        initialises = getattr(func, "__module__", None) == "torch.nn.init"
        if torch.is_grad_enabled() and target.requires_grad and not initialises:
            return _recorded(cls, func, target, args, kwargs)  # which raises for a leaf
        draws = op in names.DRAWS or initialises
        with torch.no_grad():
            if draws:
                whole = compat.local_of(target).new_empty(target.shape)
            else:
                whole = unsharded(target).clone()
    values = [whole if a is target else unsharded(a) if isinstance(a, DTensor) else a for a in flat]
    new_args, new_kwargs = pytree.tree_unflatten(values, tree)
    func(*new_args, **new_kwargs)
    with compat.plain_attributes(), torch.no_grad():
        if draws:
            whole = _drawn(whole, target)
        write_whole(whole, target)
    return target


def _draw_like(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    x = resolved(args[0])
    whole = func(compat.local_of(x).new_empty(x.shape), *args[1:], **kwargs)
    with compat.plain_attributes(), torch.no_grad():
        return part_like(_drawn(whole, x), x)


def _on_whole(cls: type[DTensor], func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The operator on whole tensors, as it is where nothing is sharded."""
    flat, tree = pytree.tree_flatten((args, kwargs))
    beside = {a.dtype for a in flat if isinstance(a, torch.Tensor) and not isinstance(a, DTensor)}
    functional = getattr(func, "__module__", None) == "torch.nn.functional"
    wholes: dict[int, tuple[DTensor, torch.Tensor]] = {}
    for a in flat:
        if isinstance(a, DTensor) and id(a) not in wholes:
            low = policy_of(a).param
            reads_low = low is not None and (
                functional or (low in beside and a.dtype not in beside)
            )
            wholes[id(a)] = a, unsharded(a, low if reads_low else None)
    new = [wholes[id(a)][1] if id(a) in wholes else a for a in flat]
    new_args, new_kwargs = pytree.tree_unflatten(new, tree)
    out = func(*new_args, **new_kwargs)
    for a in compat.written_by(func, args, kwargs):  # of a library: bitsandbytes' steps
        if isinstance(a, DTensor):
            with compat.plain_attributes(), torch.no_grad():
                write_whole(wholes[id(a)][1], a)
    return keep_views(out, wholes.values())
