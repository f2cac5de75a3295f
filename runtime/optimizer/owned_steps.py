"""Steps of matrices that have owners: these get their parts, and the others what they made.

By buckets, so that what travels is bounded, and one bucket travels while another is computed.
Elementwise states stay parts, like the parameter; states of other shapes are the owner's alone.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
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
    OwnedMatrix,
    RecordedStep,
    buckets_of,
    by_sharers,
)
from autoshard.runtime.optimizer.matrix_steps import MatrixStep, MatrixValue, is_number
from autoshard.runtime.optimizer.offloaded import part_of
from autoshard.runtime.optimizer.recording import own_attributes
from autoshard.runtime.parameters import home_of, like, wrap_local


class _Lane:
    """A matrix in a step that is run.

    wholes: of the owner, by the identity of the value that each stands for. parts: of results.
    """

    def __init__(self, matrix: OwnedMatrix, optimizer: Any, step: Any, own: dict[str, Any]) -> None:
        self.matrix = matrix
        p = matrix.parameter
        self.local = compat.local_of(p)
        self.wholes: dict[int, torch.Tensor] = {}
        self.parts: dict[int, torch.Tensor] = {}
        self._cells: dict[int, torch.Tensor] = {}
        self._held: dict[int, torch.Tensor] = {}
        self._run = MatrixStep(p.shape, p.device)
        assert p.grad is not None
        gradient = self._run.part(part_of(p, p.grad))
        entries = pytree.tree_map(self._enter, optimizer.state.get(p, {}))
        recorded = RecordedStep(self._run, self._run.part(self.local), gradient, entries)
        self._state = recorded.take(optimizer, step, matrix.group, own)
        self.division = recorded.divide()

    def _enter(self, value: Any) -> Any:
        p = self.matrix.parameter
        if not isinstance(value, torch.Tensor) or is_number(value):
            return value.full_tensor() if isinstance(value, DTensor) else value
        if value.shape == p.shape:
            found = self._run.part(part_of(p, value))
        else:
            found = self._run.owned(value.shape, value.dtype)
            if isinstance(value, DTensor) and home_of(value) is None:
                value = value.full_tensor()
            if self.matrix.is_owner:
                local = compat.local_of(value) if isinstance(value, DTensor) else value
                self.wholes[id(found)] = local
        self._held[id(found)] = value
        return found

    def ask(self, message: Message) -> None:
        """Have the owner get the whole of what it needs."""
        matrix = self.matrix
        for value in self.division.sent:
            if value.cell in self._cells:
                self.wholes[id(value)] = self._cells[value.cell]
                continue
            local = value.local
            assert local is not None
            whole = local
            if matrix.is_owner:
                whole = local.new_empty(matrix.parameter.shape)
                self.wholes[id(value)] = self._cells[value.cell] = whole
            for sender in matrix.sharers.senders(matrix.states, matrix.owner):
                bounds = matrix.bounds[sender]
                message.add(
                    sender,
                    matrix.owner,
                    [high - low for low, high in bounds],
                    value.dtype,
                    lambda part=local: part,  # type: ignore[misc]
                    lambda part, at=bounds, into=whole: _cut(into, at).copy_(part),  # type: ignore[misc]
                )

    def compute(self) -> None:
        """Run what the owner runs."""
        if self.matrix.is_owner:
            for operator in self.division.at_owner:
                operator.run(self.wholes)

    def answer(self, message: Message) -> None:
        """Have every rank get its part of what the owner made."""
        matrix = self.matrix
        for value in self.division.returned:
            for receiver, bounds in enumerate(matrix.bounds):
                whole = value.numel() == 1 and matrix.parameter.numel() != 1
                at = [] if whole else bounds
                shape = value.shape if whole else [high - low for low, high in bounds]
                message.add(
                    matrix.owner,
                    receiver,
                    shape,
                    value.dtype,
                    lambda v=value, at=at: _cut(self._whole_of(v), at),  # type: ignore[misc]
                    functools.partial(self._take, value),
                )

    def _whole_of(self, value: MatrixValue) -> torch.Tensor:
        found = self.wholes.get(id(value))
        return self._cells[value.cell] if found is None else found

    def _take(self, value: MatrixValue, part: torch.Tensor) -> None:
        if value.local is not None:
            value.local.copy_(part)
        else:
            self.parts[id(value)] = part.clone()

    def finish(self, optimizer: Any) -> None:
        """Run the rest on parts, and let the optimizer hold the states."""
        p = self.matrix.parameter
        for operator in self.division.on_parts:
            for value in operator.values:
                if value.local is not None:
                    self.parts[id(value)] = value.local
                elif id(value) not in self.parts:
                    self.parts[id(value)] = self._nothing(value)
            operator.run(self.parts)
        optimizer.state[p] = pytree.tree_map(self._leave, self._state)
        increment_version(p)

    def _nothing(self, value: MatrixValue) -> torch.Tensor:
        """The part of a result on a rank that holds no part."""
        shape = value.shape if value.numel() == 1 else self.local.shape
        return torch.zeros(shape, dtype=value.dtype, device=self.local.device)

    def _leave(self, value: Any) -> Any:
        """What the optimizer holds of a value; what it held, where that is still it."""
        if not isinstance(value, MatrixValue):
            return value
        p, held = self.matrix.parameter, self._held.get(id(value))
        before = compat.local_of(held) if isinstance(held, DTensor) else None
        if value.shape == p.shape or is_number(value):
            part = value.local if value.local is not None else self.parts.get(id(value))
            if part is before is not None:
                return held
            part = self._nothing(value) if part is None else part
            return like(p, part) if value.shape == p.shape else part
        whole = self.wholes.get(id(value))
        if before is not None and home_of(held) is not None and (whole is None or whole is before):  # type: ignore[arg-type]
            return held
        owner = self.matrix.sharers.ranks[self.matrix.owner]
        return at_home(value.shape, value.dtype, p, owner, whole)


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


def _cut(x: torch.Tensor, bounds: Sequence[tuple[int, int]]) -> torch.Tensor:
    return x[tuple(slice(low, high) for low, high in bounds)]


class _Bucket:
    """Matrices that travel together in a step."""

    def __init__(
        self, matrices: Sequence[OwnedMatrix], optimizer: Any, step: Any, own: dict[str, Any]
    ) -> None:
        first = matrices[0]
        self.lanes = [_Lane(matrix, optimizer, step, own) for matrix in matrices]
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


def step_owned(matrices: Sequence[OwnedMatrix], optimizer: Any, step: Any) -> int:
    """Step all matrices that have gradients; the bytes that this rank has sent."""
    own = copy.deepcopy(own_attributes(optimizer))
    sent = 0
    for alike in by_sharers([m for m in matrices if m.parameter.grad is not None]):
        computed: _Bucket | None = None
        begun: _Bucket | None = None
        for bucket in [*buckets_of(alike), None]:
            after = _Bucket(bucket, optimizer, step, own) if bucket else None
            if begun is not None:
                begun.compute()
                sent += begun.there.sent + begun.back.sent
            if computed is not None:
                computed.finish(optimizer)
            computed, begun = begun, after
        if computed is not None:
            computed.finish(optimizer)
    return sent
