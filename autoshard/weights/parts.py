"""The parts of tensors that a process holds, whatever holds them: a model that trains on a mesh,
one that is whole, the tensors of a server."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from autoshard.errors import AutoshardError
from autoshard.runtime import compat
from autoshard.runtime.mesh import axes_of
from autoshard.runtime.parameters import local_bounds, stored_states
from autoshard.weights.boxes import Box, elements


class HeldPart(NamedTuple):
    """A part of a tensor, which a process holds. tensor: it. box: where in the whole, of `shape`,
    it lies. owner: the tensor whose version counts what is written to it."""

    tensor: torch.Tensor
    shape: tuple[int, ...]
    box: Box
    owner: torch.Tensor


class Offered(NamedTuple):
    """What the ranks that send say of a tensor. of: the name under which it travels, another one
    where it has several."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    of: str


class WantedBox(NamedTuple):
    """A place for a box of a tensor that arrives: a view of the box's shape."""

    box: Box
    place: torch.Tensor


class Receiver(Protocol):
    """What takes tensors. Nothing of it changes before `swap`."""

    def slots(self, offered: Mapping[str, Offered]) -> dict[str, list[WantedBox]]:
        """For each tensor that is wanted the places of its boxes, in memory of their own; the same
        until `swap` or `drop`. Raises AutoshardError where what is offered does not fit."""
        ...

    def swap(self) -> None:
        """Take the values that have arrived in the slots."""
        ...

    def tensors(self) -> Iterable[torch.Tensor]:
        """Tensors on the devices on which the slots will be."""
        ...

    def drop(self) -> None:
        """Free the slots."""
        ...


class Conversion(Protocol):
    """A model whose tensors travel in another form, such as `autoshard.export.QuantizedModel`.
    form: said of it, alike on all processes. kept: the tensors that travel as they are."""

    model: nn.Module
    form: str

    @property
    def kept(self) -> Sequence[str]: ...

    def shares(self, count: int) -> Sequence[Sequence[Any]]:
        """What each of `count` processes computes: of `.part.sources`, each with the `name` and the
        `dtype` that are wanted, the `.rows`, or all where they are None."""
        ...

    def written(self, share: Any, tensors: dict[str, torch.Tensor]) -> Iterable[Any]:
        """The tensors that a share becomes: the `name`, `values` and whole `shape` of each, and the
        `first` of its rows that they are."""
        ...


def part_of(tensor: torch.Tensor, name: str) -> HeldPart:
    """What this process holds of a tensor: all of one that is not stored as shards."""
    if tensor.is_meta or tensor.layout is not torch.strided:
        what = "on the meta device" if tensor.is_meta else f"of layout {tensor.layout}"
        raise AutoshardError(
            f"{name} is {what}: it has no values to send or to take", remedy="Load it."
        )
    shape = tuple(tensor.shape)
    if isinstance(tensor, DTensor):
        box = local_bounds(shape, stored_states(tensor), axes_of(tensor.device_mesh))
        return HeldPart(compat.local_of(tensor).detach(), shape, tuple(box), tensor)
    return HeldPart(tensor.detach(), shape, tuple((0, size) for size in shape), tensor)


def parts_of(model: nn.Module) -> tuple[dict[str, HeldPart], dict[str, str]]:
    """The parameters and saved buffers of a model by the first name of each; and for every name of
    its state dict that first one."""
    inner: nn.Module = getattr(model, "_orig_mod", model)
    first: dict[int, str] = {}
    parts: dict[str, HeldPart] = {}
    names: dict[str, str] = {}
    for name, tensor in inner.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor):
            names[name] = first.setdefault(id(tensor), name)
            if names[name] == name:
                parts[name] = part_of(tensor, name)
    return parts, names


class Sender:
    """What a process has to give. names: further names of the tensors. conversion: of them, before
    they travel."""

    def __init__(
        self,
        parts: Mapping[str, HeldPart],
        names: Mapping[str, str] | None = None,
        conversion: Conversion | None = None,
    ) -> None:
        self.parts = dict(parts)
        self.names = {**{name: name for name in parts}, **(names or {})}
        self.conversion = conversion

    def copied(self) -> Sender:
        """The same values in memory of their own, which the next step leaves as they are."""
        parts = {n: p._replace(tensor=p.tensor.clone()) for n, p in self.parts.items()}
        return Sender(parts, self.names, self.conversion)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Those that it has."""
        return (part.tensor for part in self.parts.values())

    @property
    def form(self) -> str | None:
        """What its tensors become before they travel."""
        return None if self.conversion is None else self.conversion.form

    def described(self) -> dict[str, Any]:
        """What others are told: shape, dtype and box of each part, and of which one a name is."""
        return {
            "parts": {
                name: [part.shape, spelled(part.tensor.dtype), part.box]
                for name, part in self.parts.items()
            },
            "names": {name: of for name, of in self.names.items() if name != of},
        }


class Converted:
    """A sending process's share of a conversion, as a target of the values that it needs for it.
    number: of this process among the `count` that send."""

    def __init__(self, source: Sender, number: int, count: int) -> None:
        assert source.conversion is not None
        self._source, self._conversion = source, source.conversion
        self._shares = list(self._conversion.shares(count)[number])
        self._given: list[dict[str, torch.Tensor]] = []

    def slots(self, offered: Mapping[str, Offered]) -> dict[str, list[WantedBox]]:
        """See Receiver."""
        found: dict[str, list[WantedBox]] = {}
        for share in self._shares:
            self._given.append({})
            for one in share.part.sources:
                box = tuple((0, size) for size in offered[one.name].shape)
                box = box if share.rows is None else (share.rows, *box[1:])
                held = self._source.parts[offered[one.name].of].tensor
                new = held.new_empty([high - low for low, high in box], dtype=one.dtype)
                self._given[-1][one.name] = new
                found.setdefault(offered[one.name].of, []).append(WantedBox(box, new))
        return found

    def sender(self) -> Sender:
        """What this process then has to give."""
        parts = {name: self._source.parts[name] for name in self._conversion.kept}
        while self._shares:
            for made in self._conversion.written(self._shares.pop(), self._given.pop()):
                values = made.values
                low = (made.first,) + (0,) * (values.dim() - 1)
                box = tuple((a, a + size) for a, size in zip(low, values.shape)) if low else ()
                parts[made.name] = HeldPart(values, tuple(made.shape), box, values)
        names = {name: of for name, of in self._source.names.items() if of in parts}
        return Sender(parts, names)


@dataclass
class Tensors:
    """A target whose tensors have the names and the shapes of those that are sent: a model, stored
    as shards or whole. parts: by first name. names: every name's first one. fresh: nobody uses the
    values of before, so that those that arrive need no memory beside them."""

    parts: Mapping[str, HeldPart]
    names: Mapping[str, str]
    fresh: bool = False

    def __post_init__(self) -> None:
        self._new: dict[str, torch.Tensor] = {}

    def slots(self, offered: Mapping[str, Offered]) -> dict[str, list[WantedBox]]:
        """See Receiver."""
        found: dict[str, list[WantedBox]] = {}
        for name, of in self._sources(offered).items():
            part = self.parts[name]
            self._new[name] = part.tensor
            if not self.fresh:
                like = torch.empty_like(part.tensor, memory_format=torch.contiguous_format)
                self._new[name] = like
            if elements(part.box):
                found.setdefault(of, []).append(WantedBox(part.box, self._new[name]))
        return found

    def _sources(self, offered: Mapping[str, Offered]) -> dict[str, str]:
        """The tensor that is sent for each of this target's."""
        found: dict[str, str] = {}
        missing = [name for name in self.parts if name not in offered]
        for name, part in self.parts.items():
            if name in offered and offered[name].shape != part.shape:
                raise AutoshardError(
                    f"{name} has the shape {list(part.shape)} here, and is sent as "
                    f"{list(offered[name].shape)}",
                    remedy="Make the model that takes the weights of the same configuration.",
                )
        for name, first in self.names.items():
            if name in offered:
                of = found.setdefault(first, offered[name].of)
                if of != offered[name].of:
                    raise AutoshardError(
                        f"{first} and {name} are one tensor here, and are sent as two",
                        remedy="Tie them where they are trained, or untie them here.",
                    )
        missing = [name for name in missing if name not in found]
        if missing:
            shown = ", ".join(itertools.islice(missing, 4))
            raise AutoshardError(
                f"{len(missing)} of {len(self.parts)} tensors are not sent: {shown}",
                remedy="Send a model of the same class, or receive into the part of this one "
                "that is trained.",
            )
        return found

    def tensors(self) -> Iterator[torch.Tensor]:
        """See Receiver."""
        return (part.tensor for part in self.parts.values())

    def swap(self) -> None:
        """See Receiver. In place: graphs, optimizers and servers keep their tensors."""
        with torch.no_grad():
            for name, new in self._new.items():
                part = self.parts[name]
                if new is not part.tensor:
                    part.tensor.copy_(new)
                if part.owner is not part.tensor:
                    increment_version(part.owner)
        self.drop()

    def drop(self) -> None:
        """See Receiver."""
        self._new = {}


def offers(described: Mapping[int, Mapping[str, Any]]) -> dict[str, Offered]:
    """What all sending ranks offer together, by every name. Raises AutoshardError where two of them
    say different things of one tensor."""
    found: dict[str, Offered] = {}
    said: dict[str, int] = {}
    for rank, name, entry in _entries(described):
        if found.setdefault(name, entry) != entry:
            raise AutoshardError(
                f"rank {said[name]} sends {name} as {_told(found[name])}, and rank {rank} "
                f"as {_told(entry)}",
                remedy="Send one model, in one state, from all ranks of its mesh.",
            )
        said.setdefault(name, rank)
    return found


def _entries(described: Mapping[int, Mapping[str, Any]]) -> Iterator[tuple[int, str, Offered]]:
    for rank, one in sorted(described.items()):
        for name, (shape, dtype, _) in one["parts"].items():
            yield rank, name, Offered(tuple(shape), dtype_named(dtype), name)
        for name, of in one["names"].items():
            shape, dtype, _ = one["parts"][of]
            yield rank, name, Offered(tuple(shape), dtype_named(dtype), of)


def _told(entry: Offered) -> str:
    return f"{spelled(entry.dtype)} {list(entry.shape)}"


def spelled(dtype: torch.dtype) -> str:
    """A dtype as processes tell each other of it."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The dtype that is spelled so."""
    found: torch.dtype = getattr(torch, name)
    return found
