"""`WholeView`: a view of a stored tensor (`p.data[0]`, `p.T`), whose writes land in the parts.

It is a view of a gathered whole. A write to it changes the whole, of which each rank then stores
its part; what has been written to the stored tensor since is gathered again before it is used.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autoshard.runtime import compat
from autoshard.runtime.parameters.eager import operator_names as names
from autoshard.runtime.parameters.eager.gathering import unsharded
from autoshard.runtime.parameters.layout import is_sharded, write_whole


class Source:
    """A stored tensor and its gathered whole, of which views were taken."""

    def __init__(self, base: DTensor, whole: torch.Tensor) -> None:
        self.base, self.whole = base, whole
        self.seen = compat.version_of(base)

    def refresh(self) -> None:
        """Gather again if the stored tensor was written to."""
        if self.seen != compat.version_of(self.base):
            with compat.plain_attributes(), torch.no_grad():
                self.whole.copy_(unsharded(self.base))
            self.seen = compat.version_of(self.base)

    def store(self) -> None:
        """Write the whole to the parts."""
        with compat.plain_attributes(), torch.no_grad():
            write_whole(self.whole, self.base)
        self.seen = compat.version_of(self.base)


class WholeView(torch.Tensor):
    """A view of the gathered whole of a stored tensor; see this file's docstring."""

    _source: Source

    @classmethod
    @compat.never_a_frame
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if compat.compiling():
            with compat.plain_attributes():
                return func(*args, **kwargs)
        name = func.__name__
        attribute = name in ("__get__", "__set__")
        if attribute and func.__self__.__name__ not in (*names.VIEW_ATTRIBUTES, "data"):
            with compat.plain_attributes():
                return func(*args, **kwargs)
        flat, tree = pytree.tree_flatten((args, kwargs))
        sources = {id(a._source): a._source for a in flat if type(a) is WholeView}
        if name not in names.FREE:
            for source in sources.values():
                source.refresh()
        flat = [unsharded(a) if isinstance(a, DTensor) else a for a in flat]
        written = args[0] if args else None
        if (
            type(written) is WholeView
            and name not in names.FREE
            and (name == "__set__" or names.operator(name).writes)
        ):
            with compat.plain_attributes():
                if torch.is_grad_enabled() and written.requires_grad:
                    raise RuntimeError(
                        "a view of a leaf Variable that requires grad is being used in an in-place "
                        "operation."
                    )
                flat[0] = written.detach()
                new_args, new_kwargs = pytree.tree_unflatten(flat, tree)
                out = func(*new_args, **new_kwargs)
            written._source.store()
            return out if out is None else written
        new_args, new_kwargs = pytree.tree_unflatten(flat, tree)
        with compat.plain_attributes():
            out = func(*new_args, **new_kwargs)
        for source in sources.values():
            out = marked(out, source)
        return out

    # copies and files are of the values: nobody writes to the stored tensor through them

    @compat.never_a_frame
    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    @compat.never_a_frame
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.setdefault(id(self), self._plain().clone())

    def _plain(self) -> torch.Tensor:
        self._source.refresh()
        with compat.plain_attributes():
            return self.detach().as_subclass(torch.Tensor)


def keep_views(out: Any, wholes: Iterable[tuple[DTensor, torch.Tensor]]) -> Any:
    """`out`, its tensors that are views of a gathered whole as WholeViews.

    A graph of another compiler has none: it breaks there.
    """
    for base, whole in wholes:
        if not is_sharded(base):
            continue
        if not compat.compiling():
            out = marked(out, Source(base, whole))
            continue
        tensors = [x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]
        if any(compat.same_storage(x, whole) for x in tensors):
            raise NotImplementedError(f"a view of a stored tensor of shape {tuple(base.shape)}")
    return out


def marked(out: Any, source: Source) -> Any:
    """`out`, its tensors that are views of the whole of `source` as WholeViews."""
    storage = source.whole.untyped_storage().data_ptr()

    def mark(x: torch.Tensor) -> torch.Tensor:
        if type(x) not in (torch.Tensor, nn.Parameter) or compat.in_transform(x):
            return x  # one of another class, such as a graph's output to be gathered, has no memory
        if not x.numel():
            return x
        if x.layout is not torch.strided or x.untyped_storage().data_ptr() != storage:
            return x
        view = x.as_subclass(WholeView)
        view._source = source
        return view

    return pytree.tree_map_only(torch.Tensor, mark, out)
