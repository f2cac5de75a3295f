"""Steps of matrices that have owners: these get their parts, and the others what they made.

By buckets, so that what travels is bounded, and one bucket travels while another is computed.
Elementwise states stay parts, like the parameter; states of other shapes are the owner's alone.
"""

import copy
import functools
from collections.abc import Sequence, Set
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autoshard.runtime import compat
from autoshard.runtime.collectives import H
from autoshard.runtime.optimizer.exchange import Message, sharers_of
from autoshard.runtime.optimizer.matrix_owners import (
    Bounds,
    Leg,
    OwnedMatrix,
    StepProgram,
    buckets_of,
    by_sharers,
    program_key,
)
from autoshard.runtime.optimizer.matrix_steps import MatrixValue, Rows, StepOperator, is_number
from autoshard.runtime.optimizer.offloaded import part_of
from autoshard.runtime.optimizer.recording import own_attributes
from autoshard.runtime.parameters import home_of, like, wrap_local


class _Lane:
    """A matrix in a step that is run.

    parts, wholes: of this rank, and of the rows that it owns, by the identity of the value that
    each stands for.
    """

    def __init__(self, matrix: OwnedMatrix, written: StepProgram, held: Any) -> None:
        self.matrix, self.written, self.division = matrix, written, written.division
        p = matrix.parameter
        self.local = compat.local_of(p)
        self.parts: dict[int, torch.Tensor] = {}
        self.wholes: dict[int, torch.Tensor] = {}
        self._cells: dict[int, torch.Tensor] = {}
        self._held: dict[int, Any] = {}
        assert p.grad is not None
        own = matrix.sharers.own
        self._low, high = (0, 0) if own is None else matrix.rows[own]
        self._rows = Rows(high - self._low, matrix.shape[0])
        self.parts[id(written.parameter)] = self.local
        self.parts[id(written.gradient)] = part_of(p, p.grad)
        for entry, value in zip(written.entries, pytree.tree_leaves(held)):
            if isinstance(value, torch.Tensor):
                self._held[id(entry)] = value
            if isinstance(entry, MatrixValue):
                self._enter(entry, value)
        run_all(self.division.before, self.parts)

    def _enter(self, entry: MatrixValue, value: torch.Tensor) -> None:
        if entry.on_parts:
            self.parts[id(entry)] = part_of(self.matrix.parameter, value)
            return
        if isinstance(value, DTensor) and home_of(value) is None:
            value = value.full_tensor()
        if self.matrix.is_owner:
            self.wholes[id(entry)] = compat.local_of(value) if isinstance(value, DTensor) else value

    def ask(self, message: Message) -> None:
        """Have the owners get the whole of what they need."""
        matrix = self.matrix
        legs = list(matrix.there())
        for value in self.division.sent:
            if value.cell in self._cells:
                self.wholes[id(value)] = self._cells[value.cell]
                continue
            local = whole = self.parts[id(value)]
            if matrix.is_owner:
                whole = local.new_empty((self._rows.here, *matrix.shape[1:]))
                self.wholes[id(value)] = self._cells[value.cell] = whole
            for leg in legs:
                message.add(
                    *leg[:2],
                    [high - low for low, high in leg.box],
                    value.dtype,
                    functools.partial(self._part, local, leg),
                    lambda part, into=whole, leg=leg: self._whole(into, leg).copy_(part),  # type: ignore[misc]
                )

    def _part(self, local: torch.Tensor, leg: Leg) -> torch.Tensor:
        """What a leg takes of, or brings to, this rank's part."""
        own = self.matrix.bounds[self.matrix.sharers.own or 0]
        return _cut(local, leg.box, [low for low, _ in own])

    def _whole(self, whole: torch.Tensor, leg: Leg) -> torch.Tensor:
        """What a leg takes of, or brings to, the rows that this rank owns."""
        return _cut(whole, leg.box, [self._low] + [0] * (len(leg.box) - 1))

    def compute(self) -> None:
        """Run what the owner runs."""
        if self.matrix.is_owner:
            rows = self._rows if self._rows.here < self._rows.all else None
            run_all(self.division.at_owner, self.wholes, self.written.lasting, rows)

    def answer(self, message: Message) -> None:
        """Have every rank get its part of what the owners made."""
        matrix = self.matrix
        legs = list(matrix.back())
        for value in self.division.returned:
            number = value.shape != matrix.shape
            for leg in legs:
                shape = value.shape if number else [high - low for low, high in leg.box]
                message.add(
                    *leg[:2],
                    shape,
                    value.dtype,
                    functools.partial(self._made, value, None if number else leg),
                    functools.partial(self._take, value, None if number else leg),
                )

    def _made(self, value: MatrixValue, leg: Leg | None) -> torch.Tensor:
        found = self.wholes.get(id(value))
        found = self._cells[value.cell] if found is None else found
        return found if leg is None else self._whole(found, leg)

    def _take(self, value: MatrixValue, leg: Leg | None, part: torch.Tensor) -> None:
        if leg is None:
            self.parts[id(value)] = part.clone()
            return
        if id(value) not in self.parts:
            self.parts[id(value)] = torch.empty_like(self.local, dtype=value.dtype)
        self._part(self.parts[id(value)], leg).copy_(part)

    def finish(self, optimizer: Any) -> None:
        """Run the rest on parts, and let the optimizer hold the states."""
        p = self.matrix.parameter
        for value in self.division.returned:
            if id(value) not in self.parts:
                self.parts[id(value)] = self._nothing(value)
        run_all(self.division.after, self.parts, self.written.lasting)
        optimizer.state[p] = pytree.tree_map(self._leave, self.written.state)
        increment_version(p)

    def _nothing(self, value: MatrixValue) -> torch.Tensor:
        """The part of a result on a rank that holds no part."""
        shape = self.local.shape if value.shape == self.matrix.shape else value.shape
        return torch.zeros(shape, dtype=value.dtype, device=self.local.device)

    def _leave(self, value: Any) -> Any:
        """What the optimizer holds of a value; what it held, where that is still it."""
        p, held = self.matrix.parameter, self._held.get(id(value))
        if not isinstance(value, MatrixValue):
            if not isinstance(value, torch.Tensor):
                return value
            if held is None or isinstance(held, DTensor):
                return value.clone()
            return held.copy_(value)
        before = compat.local_of(held) if isinstance(held, DTensor) else None
        if value.shape == p.shape or is_number(value):
            part = self.parts.get(id(value))
            if part is before is not None:
                return held
            part = self._nothing(value) if part is None else part
            return like(p, part) if value.shape == p.shape else part
        whole = self.wholes.get(id(value))
        if before is not None and home_of(held) is not None and (whole is None or whole is before):  # type: ignore[arg-type]
            return held
        owner = self.matrix.sharers.ranks[self.matrix.owners[0]]
        return at_home(value.shape, value.dtype, p, owner, whole)


def run_all(
    operators: Sequence[StepOperator],
    known: dict[int, torch.Tensor],
    lasting: Set[int] | None = None,
    rows: Rows | None = None,
) -> None:
    """Run operators in order. lasting: values to keep; others go after their last use."""
    last: dict[int, int] = {}
    if lasting is not None:
        for at, operator in enumerate(operators):
            last.update(dict.fromkeys(operator.ids, at))
    for at, operator in enumerate(operators):
        operator.run(known, rows)
        if lasting is not None:
            for value in operator.ids:
                if last[value] == at and value not in lasting:
                    known.pop(value, None)


def at_home(
    shape: torch.Size, dtype: torch.dtype, p: DTensor, rank: int, whole: torch.Tensor | None
) -> DTensor:
    """A stored tensor that is whole on one rank of a parameter's mesh, and empty on the others."""
    mesh = _line(p.device_mesh)
    home = mesh.mesh.tolist().index(rank)
    if whole is None:
        whole = torch.empty((0, *shape[1:]), dtype=dtype, device=p.device)
    made = wrap_local(whole.contiguous(), shape, {"pp": H(home)}, mesh)
    made.__class__ = type(p)
    return made


@compat.once_a_world
def _line(mesh: DeviceMesh) -> DeviceMesh:
    """The ranks of a mesh in one line, which is called pp: its tensors may be at home on a rank."""
    everyone = sharers_of(mesh, None)
    return DeviceMesh.from_group(
        everyone.group, mesh.device_type, mesh=list(everyone.ranks), mesh_dim_names=("pp",)
    )


def _cut(x: torch.Tensor, box: Bounds, origin: Sequence[int]) -> torch.Tensor:
    return x[tuple(slice(low - at, high - at) for (low, high), at in zip(box, origin))]


class _Bucket:
    """Matrices that travel together in a step."""

    def __init__(self, lanes: list[_Lane]) -> None:
        first = lanes[0].matrix
        self.lanes = lanes
        self.there = Message(first.sharers, first.parameter.device)
        self.back = Message(first.sharers, first.parameter.device)
        for lane in self.lanes:
            lane.ask(self.there)
        self.there.start()

    def compute(self) -> None:
        """Step what this rank owns, and begin to send it back."""
        self.there.finish()
        for lane in self.lanes:
            lane.compute()
            lane.answer(self.back)
        self.back.start()

    def finish(self, optimizer: Any) -> None:
        """Wait for what this rank does not own."""
        self.back.finish()
        for lane in self.lanes:
            lane.finish(optimizer)


class OwnedSteps:
    """The steps of matrices that have owners. sent: the bytes that the last one sent to owners, and
    back from this rank."""

    def __init__(self) -> None:
        self.sent = 0
        self._written: dict[Any, StepProgram] = {}

    def step(self, matrices: Sequence[OwnedMatrix], optimizer: Any, step: Any) -> None:
        """Step all that have gradients."""
        own = copy.deepcopy(own_attributes(optimizer))
        settings = [{**group, "params": 0} for group in optimizer.param_groups]
        before, self._written = self._written, {}

        def begun(matrix: OwnedMatrix) -> _Lane:
            p, group = matrix.parameter, matrix.group
            held = optimizer.state.get(p, {})
            key = program_key(group, p, held, own, settings[group])
            written = self._written.get(key) or before.get(key) if key is not None else None
            if written is None:
                written = StepProgram(optimizer, step, group, p, held, own)
            if key is not None:
                self._written[key] = written
            return _Lane(matrix, written, held)

        self.sent = 0
        for alike in by_sharers([m for m in matrices if m.parameter.grad is not None]):
            computed: _Bucket | None = None
            sending: _Bucket | None = None
            for bucket in [*buckets_of(alike), None]:
                after = _Bucket(list(map(begun, bucket))) if bucket else None
                if sending is not None:
                    sending.compute()
                    self.sent += sending.there.sent + sending.back.sent
                if computed is not None:
                    computed.finish(optimizer)
                computed, sending = sending, after
            if computed is not None:
                computed.finish(optimizer)
