"""An update: weights go from the processes that hold them to those that want them, by the plan, and
all of these swap at once or none."""

from __future__ import annotations

import hashlib
import json
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autoshard.errors import AutoshardError
from autoshard.runtime.engine import Engine
from autoshard.weights.boxes import Box, box_of, common, view
from autoshard.weights.link import (
    DEVICE_GROUPS,
    Refused,
    Together,
    Way,
    WeightLink,
    place_of,
    world_link,
)
from autoshard.weights.moves import ALIGNED, Layouts, Move, Want, padded, plan_moves, rounds
from autoshard.weights.parts import (
    Conversion,
    Converted,
    Offered,
    Receiver,
    Sender,
    Tensors,
    WantedBox,
    dtype_named,
    offers,
    part_of,
    parts_of,
    spelled,
)
from autoshard.weights.servers import EngineTensors

BUFFER = 64 * 2**20

Weights = nn.Module | Conversion | Sender
Target = nn.Module | Mapping[str, torch.Tensor] | Engine | Receiver


@dataclass(frozen=True)
class UpdateReport:
    """What an update was, as one process sees it.

    version: what the senders called it. sent, received, copied: bytes, the last ones within the
    process. fullest: bytes that the fullest sender of all sent. link: that the fullest pair of
    processes exchanged one way. total: that all sent. buffer: bytes of memory that slices took on
    their way, at most, in so many rounds. before: the same of what senders gave each other first,
    where they convert what they send.
    """

    version: int | None
    sent: int
    received: int
    copied: int
    fullest: int
    link: int
    total: int
    buffer: int
    rounds: int
    before: UpdateReport | None = None


class Update:
    """One update, as one process takes part in it: with a source, a target, both or neither.

    buffer: bytes that may be on their way in this process; the least that any process says counts.
    background: `wait` returns when it is done, and swaps; else the constructor does. What is sent
    in the background is copied before.
    """

    def __init__(
        self,
        link: WeightLink,
        source: Sender | None,
        target: Receiver | None,
        version: int | None,
        buffer: int,
        background: bool,
    ) -> None:
        self._link, self._target = link, target
        self._source = source.copied() if source and background else source
        self._version, self._buffer = version, buffer
        self._report: UpdateReport | None = None
        self._devices = set(
            () if source is None else (p.tensor.device for p in source.parts.values())
        )
        self._devices |= set(() if target is None else (t.device for t in target.tensors()))
        self._place = place_of(self._devices)
        self._synchronize()  # the thread copies on a stream of its own
        self._together = Together(link, self._run)
        if not background:
            self.wait()

    def wait(self) -> UpdateReport:
        """End it: what has arrived is swapped in. Raises what went wrong, on every process: then
        the weights of before are whole."""
        if self._report is None:
            try:
                self._report = self._together.wait()
                if self._target is not None:
                    self._target.swap()
            finally:
                if self._target is not None:
                    self._target.drop()
        return self._report

    @property
    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._together.done

    def _run(self) -> UpdateReport:
        for device in self._accelerators():  # a thread begins with the first one
            torch.accelerator.set_device_index(device)
        with torch.no_grad():
            report = self._moved()
        self._synchronize()
        return report

    def _accelerators(self) -> list[torch.device]:
        return [device for device in self._devices if device.type in DEVICE_GROUPS]

    def _synchronize(self) -> None:
        for device in self._accelerators():
            torch.accelerator.synchronize(device)

    def _moved(self) -> UpdateReport:
        source, told = self._source, self._told(self._source)
        if told[self._senders(told)[0]]["form"] is None:
            return self._move(source, told, *self._agree(told, self._target))
        share = None
        if source is not None:
            senders = self._senders(told)
            share = Converted(source, senders.index(self._link.rank), len(senders))
        before = self._move(source, told, *self._agree(told, share))
        source = None if share is None else share.sender()
        told = self._told(source)
        return replace(self._move(source, told, *self._agree(told, self._target)), before=before)

    def _told(self, source: Sender | None) -> list[Any]:
        """What every process says of itself. Raises on all of them where they send what cannot be
        sent together."""
        told = self._link.gather(
            {
                "version": self._version,
                "buffer": self._buffer,
                "node": socket.gethostname(),
                "place": self._place,
                "form": None if source is None else source.form,
                "holds": None if source is None else source.described(),
            }
        )
        senders = self._senders(told)
        if not senders:
            raise Refused("no process sends", remedy="Call autoshard.weights.send on some.")
        for key, what in (("version", "versions"), ("form", "forms")):
            said = {told[rank][key] for rank in senders}
            if len(said) > 1:
                raise Refused(
                    f"the processes send the {what} {sorted(map(str, said))}",
                    remedy="Send one model after the same step, in one form, on all of them.",
                )
        return told

    def _senders(self, told: Sequence[Any]) -> list[int]:
        return [rank for rank, one in enumerate(told) if one["holds"] is not None]

    def _agree(
        self, told: list[Any], target: Receiver | Converted | None
    ) -> tuple[dict[str, list[WantedBox]], list[Any]]:
        """Where what arrives will lie here, and what everybody wants. Raises on every process where
        anybody finds an error."""
        found: dict[str, Offered] = {}
        slots: dict[str, list[WantedBox]] = {}
        wants: dict[str, Any] = {}
        error = None
        try:
            found = offers({rank: told[rank]["holds"] for rank in self._senders(told)})
            slots = {} if target is None else target.slots(found)
            for name, some in slots.items():
                wire = spelled(_wire(name, found[name].dtype, some))
                wants[name] = [wire, [slot.box for slot in some]]
        except Exception as raised:
            error = str(raised) if isinstance(raised, AutoshardError) else repr(raised)
        asked = self._link.gather({"error": error, "wants": wants})
        self._link.agree([one["error"] for one in asked])
        return slots, [one["wants"] for one in asked]

    def _move(
        self,
        source: Sender | None,
        told: list[Any],
        slots: Mapping[str, list[WantedBox]],
        wants: list[Any],
    ) -> UpdateReport:
        link, rank = self._link, self._link.rank
        budget = max(4 * ALIGNED, min(one["buffer"] for one in told))
        copies, groups = _planned(link, told, wants, budget)
        dtypes = {
            (r, name): dtype_named(one[0]) for r, by in enumerate(wants) for name, one in by.items()
        }
        for move in copies:
            if move.receiver == rank:
                _unpack(slots[move.name], move.box, _part(source, move))
        most = 0
        mine = [[m for m in group if rank in (m.sender, m.receiver)] for group in groups]
        size = max((sum(map(padded, group)) for group in mine), default=0)
        way = link.way([one["place"] for one in told], self._devices)
        memory = torch.empty(size, dtype=torch.uint8, device=way.device)
        for group in mine:
            most = max(most, self._round(source, group, way, memory, dtypes, slots))
        sent, pairs = Counter[int](), Counter[tuple[int, int]]()
        for move in (move for group in groups for move in group):
            sent[move.sender] += move.bytes
            pairs[move.sender, move.receiver] += move.bytes
        version = next(one["version"] for one in told if one["holds"] is not None)
        return UpdateReport(
            version,
            sent[rank],
            sum(m.bytes for group in mine for m in group if m.receiver == rank),
            sum(m.bytes for m in copies if m.receiver == rank),
            max(sent.values(), default=0),
            max(pairs.values(), default=0),
            sum(sent.values()),
            most,
            len(groups),
        )

    def _round(
        self,
        source: Sender | None,
        group: list[Move],
        way: Way,
        memory: torch.Tensor,
        dtypes: Mapping[tuple[int, str], torch.dtype],
        slots: Mapping[str, list[WantedBox]],
    ) -> int:
        """Send and receive the moves of a round; the bytes of the buffer that they took."""
        at = 0
        arriving: list[tuple[Move, torch.Tensor, torch.Tensor]] = []
        leaving: list[tuple[Move, torch.Tensor, torch.Tensor]] = []
        for move in group:
            data = memory[at : at + move.bytes]
            at += padded(move)
            values = data.view(dtypes[move.receiver, move.name])
            values = values.view([high - low for low, high in move.box])
            mine = move.receiver == self._link.rank
            (arriving if mine else leaving).append((move, values, data))

        def packed() -> Iterator[tuple[torch.Tensor, int]]:
            for move, values, data in leaving:
                values.copy_(_part(source, move))
                yield data, move.receiver

        way.exchange([(data, move.sender) for move, _, data in arriving], packed())
        for move, values, _ in arriving:
            _unpack(slots[move.name], move.box, values)
        return at


def _part(source: Sender | None, move: Move) -> torch.Tensor:
    """What leaves with a move."""
    assert source is not None
    part = source.parts[move.name]
    return view(part.tensor, part.box, move.box)


def _unpack(slots: list[WantedBox], box: Box, values: torch.Tensor) -> None:
    """Write the values of a box to the places that want some of them."""
    for slot in slots:
        both = common(slot.box, box)
        if both is not None or not box:
            both = both or ()
            view(slot.place, slot.box, both).copy_(view(values, box, both))


def _wire(name: str, sent: torch.dtype, slots: list[WantedBox]) -> torch.dtype:
    """The dtype in which a tensor travels: the one it has where it arrives, if that is no wider.
    Numbers of 8 bits need their scales: no cast makes them, nor back."""
    wanted = {slot.place.dtype for slot in slots}
    for dtype in wanted - {sent}:
        if not all(one.is_floating_point and one.itemsize > 1 for one in (dtype, sent)):
            raise AutoshardError(
                f"{name} is {spelled(dtype)} here, and is sent as {spelled(sent)}",
                remedy="Send autoshard.export.QuantizedModel(model, kind) to what is quantized.",
            )
    narrow = len(wanted) == 1 and next(iter(wanted)).itemsize <= sent.itemsize
    return wanted.pop() if narrow else sent


def _planned(
    link: WeightLink, told: list[Any], wants: list[Any], budget: int
) -> tuple[list[Move], list[list[Move]]]:
    """Copies, and rounds of what travels; those of the last update where its layouts were these."""
    key = json.dumps([[one["holds"], one["node"]] for one in told] + [wants, budget])
    digest = hashlib.sha256(key.encode()).hexdigest()
    if digest not in link.plans:
        if len(link.plans) > 1:  # an update with a conversion has two
            link.plans.clear()
        nodes = [one["node"] for one in told]
        layouts = Layouts(
            {
                rank: {name: box_of(b) for name, (_, _, b) in one["holds"]["parts"].items()}
                for rank, one in enumerate(told)
                if one["holds"] is not None
            },
            {
                rank: {
                    name: Want(tuple(map(box_of, boxes)), dtype_named(dtype).itemsize)
                    for name, (dtype, boxes) in by.items()
                }
                for rank, by in enumerate(wants)
            },
            {rank: nodes.index(node) for rank, node in enumerate(nodes)},
        )
        moves = plan_moves(layouts, max(ALIGNED, budget // 4 // ALIGNED * ALIGNED))
        copies = [move for move in moves if move.sender == move.receiver]
        link.plans[digest] = copies, rounds(moves, budget)
    found: tuple[list[Move], list[list[Move]]] = link.plans[digest]
    return found


def send(
    source: Weights,
    link: WeightLink | None = None,
    *,
    version: int | None = None,
    buffer: int = BUFFER,
    background: bool = False,
) -> Update:
    """Give a model's weights to the processes that receive. source: the model, or
    `autoshard.export.QuantizedModel` of it.

    link: the processes of the update; None: all of this world. version: what receivers are told,
    such as the step. buffer: bytes of memory for slices on their way. background: return at once,
    with a copy of what this process holds on its way; `wait()` ends it.
    """
    return Update(link or world_link(), _given(source), None, version, buffer, background)


def receive(
    target: Target,
    link: WeightLink | None = None,
    *,
    buffer: int = BUFFER,
    background: bool = False,
) -> Update:
    """Take the weights that others send: for a model, stored as shards on any mesh or whole, for
    tensors by the names that are sent, for those of a server or of a running engine. All of them
    are swapped in, in place, when all have arrived everywhere; until then, and after an error,
    those of before are there.

    background: return at once; the swap is in `wait()`. Other arguments as for `send`.
    """
    return Update(link or world_link(), None, _taken(target), None, buffer, background)


def transfer(
    source: Weights,
    target: Target,
    link: WeightLink | None = None,
    *,
    version: int | None = None,
    buffer: int = BUFFER,
    background: bool = False,
) -> Update:
    """`send` and `receive` in one process: what it holds itself is copied."""
    given, taken = _given(source), _taken(target)
    return Update(link or world_link(), given, taken, version, buffer, background)


def _given(source: Weights) -> Sender:
    if isinstance(source, Sender):
        return source
    if isinstance(source, nn.Module):
        return Sender(*parts_of(source))
    return Sender(*parts_of(source.model), source)


def _taken(target: Target) -> Receiver:
    if isinstance(target, nn.Module):
        return Tensors(*parts_of(target))
    if isinstance(target, Engine):
        return EngineTensors(target)
    if isinstance(target, Mapping):
        parts = {name: part_of(tensor, name) for name, tensor in target.items()}
        return Tensors(parts, {name: name for name in parts})
    return target
