"""An update: weights go from the processes that hold them to those that want them, by the plan, and
all of these swap at once or none."""

from __future__ import annotations

import hashlib
import json
import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoshard.errors import AutoshardError
from autoshard.weights.boxes import Box, common, view
from autoshard.weights.link import Together, WeightLink, world_link
from autoshard.weights.moves import ALIGNED, Layouts, Move, Want, padded, plan_moves, rounds
from autoshard.weights.parts import (
    Offered,
    Receiver,
    Sender,
    Tensors,
    WantedBox,
    dtype_named,
    offers,
    parts_of,
    spelled,
)

BUFFER = 64 * 2**20


@dataclass(frozen=True)
class UpdateReport:
    """What an update was, as one process sees it.

    version: what the senders called it. sent, received, copied: bytes, the last ones within the
    process. fullest: bytes that the fullest sender of all sent. link: that the fullest pair of
    processes exchanged one way. total: that all sent. buffer: bytes of memory that slices took on
    their way, at most, in so many rounds.
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
        if torch.cuda.is_available():  # the thread copies on a stream of its own
            torch.cuda.synchronize()
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
        with torch.no_grad():
            report = self._move(*self._agree())
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return report

    def _agree(self) -> tuple[list[Any], dict[str, Offered], dict[str, list[WantedBox]], list[Any]]:
        """What everybody has, and wants. Raises on every process where anybody finds an error."""
        told = self._link.gather(
            {
                "version": self._version,
                "buffer": self._buffer,
                "node": socket.gethostname(),
                "holds": None if self._source is None else self._source.described(),
            }
        )
        found: dict[str, Offered] = {}
        slots: dict[str, list[WantedBox]] = {}
        error = None
        try:
            held = {rank: one["holds"] for rank, one in enumerate(told) if one["holds"] is not None}
            if not held:
                raise AutoshardError(
                    "no process sends", remedy="Call autoshard.weights.send on some."
                )
            versions = {told[rank]["version"] for rank in held}
            if len(versions) > 1:
                raise AutoshardError(
                    f"the processes send the versions {sorted(map(str, versions))}",
                    remedy="Send after the same step on all of them.",
                )
            found = offers(held)
            slots = {} if self._target is None else self._target.slots(found)
        except Exception as raised:
            error = str(raised) if isinstance(raised, AutoshardError) else repr(raised)
        wants = {
            name: [spelled(_wire(found[name].dtype, some)), [slot.box for slot in some]]
            for name, some in slots.items()
        }
        asked = self._link.gather({"error": error, "wants": wants})
        self._link.agree([one["error"] for one in asked])
        return told, found, slots, [one["wants"] for one in asked]

    def _move(
        self,
        told: list[Any],
        found: Mapping[str, Offered],
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
                part = self._part(move)
                _unpack(slots[move.name], move.box, part)
        most = 0
        mine = [[m for m in group if rank in (m.sender, m.receiver)] for group in groups]
        size = max((sum(map(padded, group)) for group in mine), default=0)
        memory = torch.empty(size, dtype=torch.uint8)
        for group in mine:
            most = max(most, self._round(group, memory, dtypes, slots))
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
        group: list[Move],
        memory: torch.Tensor,
        dtypes: Mapping[tuple[int, str], torch.dtype],
        slots: Mapping[str, list[WantedBox]],
    ) -> int:
        """Send and receive the moves of a round; the bytes of the buffer that they took."""
        rank, at = self._link.rank, 0
        works, arriving, leaving = [], [], []
        for move in group:
            data = memory[at : at + move.bytes]
            at += padded(move)
            values = data.view(dtypes[move.receiver, move.name])
            values = values.view([high - low for low, high in move.box])
            if move.receiver == rank:
                works.append(self._link.receive(data, move.sender))
                arriving.append((move, values))
            else:
                leaving.append((move, values, data))
        for move, values, data in leaving:
            values.copy_(self._part(move))
            works.append(self._link.send(data, move.receiver))
        for work in works:
            work.wait()
        for move, values in arriving:
            _unpack(slots[move.name], move.box, values)
        return at

    def _part(self, move: Move) -> torch.Tensor:
        assert self._source is not None
        part = self._source.parts[move.name]
        return view(part.tensor, part.box, move.box)


def _unpack(slots: list[WantedBox], box: Box, values: torch.Tensor) -> None:
    """Write the values of a box to the places that want some of them."""
    for slot in slots:
        both = common(slot.box, box)
        if both is not None or not box:
            both = both or ()
            view(slot.place, slot.box, both).copy_(view(values, box, both))


def _wire(sent: torch.dtype, slots: list[WantedBox]) -> torch.dtype:
    """The dtype in which a tensor travels: the one it has where it arrives, if that is no wider."""
    wanted = {slot.place.dtype for slot in slots}
    narrow = len(wanted) == 1 and next(iter(wanted)).itemsize <= sent.itemsize
    return wanted.pop() if narrow else sent


def _planned(
    link: WeightLink, told: list[Any], wants: list[Any], budget: int
) -> tuple[list[Move], list[list[Move]]]:
    """Copies, and rounds of what travels; those of the last update where its layouts were these."""
    key = json.dumps([[one["holds"], one["node"]] for one in told] + [wants, budget])
    digest = hashlib.sha256(key.encode()).hexdigest()
    if digest not in link.plans:
        link.plans.clear()
        nodes = [one["node"] for one in told]
        layouts = Layouts(
            {
                rank: {name: _box(box) for name, (_, _, box) in one["holds"]["parts"].items()}
                for rank, one in enumerate(told)
                if one["holds"] is not None
            },
            {
                rank: {
                    name: Want(tuple(map(_box, boxes)), dtype_named(dtype).itemsize)
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


def _box(given: list[list[int]]) -> Box:
    return tuple((low, high) for low, high in given)


def send(
    source: nn.Module | Sender,
    link: WeightLink | None = None,
    *,
    version: int | None = None,
    buffer: int = BUFFER,
    background: bool = False,
) -> Update:
    """Give a model's weights to the processes that receive.

    link: the processes of the update; None: all of this world. version: what receivers are told,
    such as the step. buffer: bytes of memory for slices on their way. background: return at once,
    with a copy of what this process holds on its way; `wait()` ends it.
    """
    return Update(link or world_link(), _given(source), None, version, buffer, background)


def receive(
    target: nn.Module | Receiver,
    link: WeightLink | None = None,
    *,
    buffer: int = BUFFER,
    background: bool = False,
) -> Update:
    """Take the weights that others send: for a model, stored as shards on any mesh or whole, or for
    the tensors of a server. All of them are swapped in, in place, when all have arrived everywhere;
    until then, and after an error, those of before are there.

    background: return at once; the swap is in `wait()`. Other arguments as for `send`.
    """
    return Update(link or world_link(), None, _taken(target), None, buffer, background)


def transfer(
    source: nn.Module | Sender,
    target: nn.Module | Receiver,
    link: WeightLink | None = None,
    *,
    version: int | None = None,
    buffer: int = BUFFER,
    background: bool = False,
) -> Update:
    """`send` and `receive` in one process: what it holds itself is copied."""
    given, taken = _given(source), _taken(target)
    return Update(link or world_link(), given, taken, version, buffer, background)


def _given(source: nn.Module | Sender) -> Sender:
    return Sender(*parts_of(source)) if isinstance(source, nn.Module) else source


def _taken(target: nn.Module | Receiver) -> Receiver:
    return Tensors(*parts_of(target)) if isinstance(target, nn.Module) else target
