"""Which rank steps which matrix, by what a step of it is: recorded, and not run.

What reads a parameter whole, and multiplies or factorises it, is done once: by its owner among the
ranks that hold parts or copies of it. The seconds of all are balanced.
"""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from autoshard.runtime import compat
from autoshard.runtime.optimizer.balance import balanced
from autoshard.runtime.optimizer.derived import proxy_of
from autoshard.runtime.optimizer.exchange import Sharers, sharers_of, unsplit_states
from autoshard.runtime.optimizer.matrix_steps import Division, MatrixStep, MatrixValue, is_number
from autoshard.runtime.optimizer.recording import own_attributes
from autoshard.runtime.parameters import home_of, stored_states

BUCKET = 64 << 20
"""Bytes of wholes that an owner gets in one exchange, where more than one matrix travels."""


class Rates(NamedTuple):
    """Of a rank, a second: floating-point operations, bytes of memory, bytes of its link."""

    flops: float
    memory: float
    link: float


RATES = {"cpu": Rates(5e10, 1e10, 1e9), "cuda": Rates(4e14, 3e12, 1e11)}
"""What owners are balanced by. Where all ranks are alike, only the ratios matter."""


class Work(NamedTuple):
    """What a matrix's step is. sent, returned: bytes of the wholes that go to the owner, and back.
    why: why it has no owner, "" where it has one."""

    flops: float = 0.0
    nbytes: int = 0
    sent: int = 0
    returned: int = 0
    why: str = ""

    def seconds(self, rates: Rates) -> float:
        """Of the owner: its operators, and its link while matrices arrive and leave."""
        link = (self.sent + self.returned) / rates.link
        return max(self.flops / rates.flops, self.nbytes / rates.memory) + link


@dataclass
class OwnedMatrix:
    """A stored parameter that its owner steps. group: the index of its settings. owner: its place
    among the sharers."""

    parameter: DTensor
    group: int
    sharers: Sharers
    work: Work
    owner: int = 0

    def __post_init__(self) -> None:
        p = self.parameter
        self.states = unsplit_states(stored_states(p))
        self.bounds = self.sharers.bounds(p.shape, self.states)

    @property
    def is_owner(self) -> bool:
        """Whether this rank is."""
        return self.owner == self.sharers.own

    def pinned(self, held: Any) -> int | None:
        """The owner that has its states already."""
        for value in pytree.tree_leaves(held):
            if isinstance(value, DTensor) and value.shape != self.parameter.shape:
                home = home_of(value)
                if home is not None and value.device_mesh.ndim == 1:
                    rank = int(value.device_mesh.mesh[home])
                    if rank in self.sharers.ranks:
                        return self.sharers.ranks.index(rank)
        return None


def matrix_of(
    optimizer: Any, step: Any, group: int, parameter: DTensor, known: dict[Any, Work]
) -> OwnedMatrix:
    """A parameter with what its step is, found by a step of it without memory."""
    sharers = sharers_of(parameter.device_mesh, home_of(parameter))
    held = optimizer.state.get(parameter, {})
    shapes = tuple(
        tuple(value.shape) if isinstance(value, torch.Tensor) else type(value)
        for value in pytree.tree_leaves(held)
    )
    key = group, parameter.shape, parameter.dtype, parameter.device, shapes
    if key not in known:
        try:
            known[key] = work_of(optimizer, step, group, parameter, held)
        except Exception as error:  # whatever an optimizer's code does not do so
            why = str(error).partition("\n")[0]
            known[key] = Work(why=f"{type(error).__name__}: {why}")
    return OwnedMatrix(parameter, group, sharers, known[key])


def work_of(optimizer: Any, step: Any, group: int, like: torch.Tensor, held: Any) -> Work:
    """What the owner of a matrix does in the second of two steps, which are not run."""
    shape = like.shape
    state: Any = pytree.tree_map(lambda x: _copied(x, shape), held)
    work, own = Work(), own_attributes(optimizer)
    settings: list[dict[str, Any]] = [{} for _ in optimizer.param_groups]
    for _ in range(2):
        run = MatrixStep(shape, like.device, dry=True)
        local = torch.empty(shape, dtype=like.dtype, device="meta")
        entries = pytree.tree_map(functools.partial(_dry_value, run), state)
        recorded = RecordedStep(run, run.part(local), run.part(local), entries)
        state = recorded.take(optimizer, step, group, own, settings)
        division = recorded.divide()
        flops, nbytes = division.work()
        found = Work(flops, nbytes, _nbytes(division.sent), _nbytes(division.returned))
        work = found if found.flops else work
    return work


def _nbytes(values: Sequence[MatrixValue]) -> int:
    return sum(x.numel() * x.dtype.itemsize for x in values)


def _copied(x: Any, shape: torch.Size) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    return x.detach().clone() if is_number(x) else torch.empty_like(x, device="meta")


def _dry_value(run: MatrixStep, x: Any) -> Any:
    if not isinstance(x, torch.Tensor) or (is_number(x) and not isinstance(x, MatrixValue)):
        return x
    if x.shape == run.shape:
        return run.part(torch.empty(x.shape, dtype=x.dtype, device="meta"))
    return run.owned(x.shape, x.dtype)


class RecordedStep:
    """A step of one matrix, as the optimizer's code has written it down."""

    def __init__(
        self, run: MatrixStep, parameter: MatrixValue, gradient: MatrixValue, held: Any
    ) -> None:
        self.run, self.parameter, self.gradient = run, parameter, gradient
        self.held = held
        self.state: Any = {}

    def take(
        self,
        optimizer: Any,
        step: Any,
        group: int,
        own: dict[str, Any],
        settings: Sequence[dict[str, Any]] = (),
    ) -> Any:
        """Run the optimizer's code; the state that it leaves.

        own: the optimizer's own attributes, as they are before a step. settings: those of groups
        that are not the optimizer's, and become what the step leaves.
        """
        groups: list[list[Any]] = [[] for _ in optimizer.param_groups]
        groups[group] = [self.parameter]
        self.parameter.grad = self.gradient
        states: Any = defaultdict(dict)
        if self.held:
            states[self.parameter] = self.held
        proxy = proxy_of(optimizer, groups, states)
        proxy.__dict__.update(copy.deepcopy(own))
        for given, chosen in zip(settings, proxy.param_groups):
            chosen.update(given)
        for chosen in proxy.param_groups:
            for name, value in chosen.items():
                if isinstance(value, torch.Tensor):
                    chosen[name] = value.detach().clone()
        with compat.plain_attributes(), self.run:
            step(proxy)
        for given, chosen in zip(settings, proxy.param_groups):
            given.update({name: value for name, value in chosen.items() if name != "params"})
        self.state = proxy.state.get(self.parameter, {})
        return self.state

    def divide(self) -> Division:
        """Where its operators run."""
        kept = [x for x in pytree.tree_leaves(self.state) if isinstance(x, MatrixValue)]
        given = [x for x in pytree.tree_leaves(self.held) if isinstance(x, MatrixValue)]
        return self.run.divide(kept, [self.parameter, *given])


def assign_owners(matrices: Sequence[OwnedMatrix], optimizer: Optimizer) -> None:
    """Balances the seconds of the matrices over their sharers. Those whose states have an owner
    keep it."""
    for alike in by_sharers(matrices):
        rates = RATES.get(alike[0].parameter.device.type, RATES["cuda"])
        given = [0.0] * len(alike[0].sharers.ranks)
        free = []
        for matrix in alike:
            pinned = matrix.pinned(optimizer.state.get(matrix.parameter, {}))
            if pinned is None:
                free.append(matrix)
            else:
                matrix.owner = pinned
                given[pinned] += matrix.work.seconds(rates)
        found = balanced([matrix.work.seconds(rates) for matrix in free], given)
        for matrix, owner in zip(free, found.owners):
            matrix.owner = owner


def by_sharers(matrices: Sequence[OwnedMatrix]) -> Iterator[list[OwnedMatrix]]:
    """The matrices of each set of ranks."""
    groups: dict[tuple[int, ...], list[OwnedMatrix]] = {}
    for matrix in matrices:
        groups.setdefault(matrix.sharers.ranks, []).append(matrix)
    yield from groups.values()


def buckets_of(matrices: Sequence[OwnedMatrix], limit: int = BUCKET) -> list[list[OwnedMatrix]]:
    """Matrices that travel together: of each owner as many as of the others, the longest first."""
    turns: dict[int, int] = defaultdict(int)
    ranked = []
    for matrix in sorted(matrices, key=lambda m: -m.work.flops):
        ranked.append((turns[matrix.owner], matrix))
        turns[matrix.owner] += 1
    buckets: list[list[OwnedMatrix]] = []
    held: dict[int, int] = {}
    for _, matrix in sorted(ranked, key=lambda each: each[0]):
        nbytes = held.get(matrix.owner, 0) + max(matrix.work.sent, matrix.work.returned)
        if not buckets or (held.get(matrix.owner, 0) and nbytes > limit):
            buckets.append([])
            held = {}
            nbytes = max(matrix.work.sent, matrix.work.returned)
        held[matrix.owner] = nbytes
        buckets[-1].append(matrix)
    return buckets
