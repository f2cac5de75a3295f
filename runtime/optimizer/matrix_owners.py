"""Which rank steps which matrix, by what a step of it is: recorded, and not run.

What reads a parameter whole, and multiplies or factorises it, is done once: by its owner among the
ranks that hold parts or copies of it. The seconds of all are balanced.
"""

import copy
import functools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autoshard.runtime import compat
from autoshard.runtime.collectives import State
from autoshard.runtime.optimizer.balance import balanced
from autoshard.runtime.optimizer.derived import proxy_of
from autoshard.runtime.optimizer.exchange import Sharers, sharers_of, unsplit_states
from autoshard.runtime.optimizer.matrix_steps import MatrixStep, MatrixValue, is_number
from autoshard.runtime.optimizer.recording import own_attributes
from autoshard.runtime.parameters import home_of, stored_states

Matrix = TypeVar("Matrix", bound="SharedMatrix")

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
    """What a matrix's step is.

    dtype: of its products. sent, returned: bytes of the wholes that go to the owner, and back;
    numbers: of those that every rank gets beside. states: of what its owner alone keeps. moments:
    how many tensors of the matrix's shape are kept. by_rows: whether it is a stack, each matrix of
    which is stepped by itself. why: why it has no owner, "" where it has one.
    """

    flops: float = 0.0
    nbytes: int = 0
    dtype: torch.dtype = torch.float32
    sent: int = 0
    returned: int = 0
    numbers: int = 0
    states: int = 0
    moments: int = 0
    by_rows: bool = False
    why: str = ""


Bounds = list[tuple[int, int]]
"""Of each dim of a matrix the first index and one past the last."""


class Leg(NamedTuple):
    """A part that travels, or stays: by the places of its sharers, in the whole."""

    sender: int
    receiver: int
    box: Bounds


@dataclass
class SharedMatrix:
    """A matrix, or a stack of them, and which of its sharers steps which rows.

    states: where it is stored. rows: by sharer the first row and one past the last; all of a matrix
    are one sharer's.
    """

    shape: torch.Size
    states: Mapping[str, State]
    sharers: Sharers
    work: Work

    def __post_init__(self) -> None:
        self.bounds = self.sharers.bounds(self.shape, self.states)
        self.rows: list[tuple[int, int]] = [(0, 0)] * len(self.sharers.ranks)

    @property
    def owners(self) -> list[int]:
        """The sharers that step rows of it."""
        return [place for place, (low, high) in enumerate(self.rows) if high > low]

    def own(self, place: int) -> None:
        """Give all of it to one sharer."""
        self.rows = [(0, 0)] * len(self.rows)
        self.rows[place] = 0, self.shape[0]

    def seconds(self, rates: Rates) -> float:
        """Of the owner: its operators, and its link while what it has not arrives, and leaves."""
        work, parts = self.work, [bounds for bounds in self.bounds if _numel(bounds)]
        own = parts[0][1:] if work.by_rows else parts[0]
        lacks = 1 - _numel(own) / math.prod(self.shape[1:] if work.by_rows else self.shape)
        link = lacks * (work.sent + work.returned) / rates.link
        return max(work.flops / rates.flops, work.nbytes / rates.memory) + link

    def spread(self, loads: list[float], rates: Rates) -> None:
        """Give each matrix of a stack to a rank that holds some of it, evenly, the rest to those
        that have the least to do. loads: seconds of the sharers, to which these are added."""
        each = self.seconds(rates) / self.shape[0]
        holders: dict[tuple[int, int], list[int]] = defaultdict(list)
        for place, bounds in enumerate(self.bounds):
            if _numel(bounds):
                holders[bounds[0]].append(place)
        for (low, high), places in holders.items():
            whole, left = divmod(high - low, len(places))
            more = set(sorted(places, key=lambda place: (loads[place], place))[:left])
            for place in places:
                count = whole + (place in more)
                self.rows[place] = low, low + count
                loads[place] += each * count
                low += count

    def there(self) -> Iterator[Leg]:
        """The parts that the owners need."""
        for owner in self.owners:
            for sender in self.sharers.senders(self.states, owner):
                yield Leg(sender, owner, _within(self.bounds[sender], self.rows[owner]))

    def back(self) -> Iterator[Leg]:
        """The parts of what the owners have made."""
        for owner in self.owners:
            for receiver, bounds in enumerate(self.bounds):
                yield Leg(owner, receiver, _within(bounds, self.rows[owner]))

    def nbytes(self) -> int:
        """Bytes that all sharers send in a step: what the owners lack of the whole, there, and all
        parts but the owners', back."""
        owners, work = self.owners, self.work
        stays = sum(_numel(_within(self.bounds[place], self.rows[place])) for place in owners)
        parts, numel = sum(map(_numel, self.bounds)), self.shape.numel()
        numbers = work.numbers * len(owners) * (len(self.rows) - 1)
        there, back = work.sent // numel, work.returned // numel
        return there * (numel - stays) + back * (parts - stays) + numbers

    def share(self, place: int) -> float:
        """The part of the work that a sharer does."""
        low, high = self.rows[place]
        return (high - low) / self.shape[0]


def _within(bounds: Bounds, rows: tuple[int, int]) -> Bounds:
    low, high = max(bounds[0][0], rows[0]), min(bounds[0][1], rows[1])
    return [(low, max(low, high)), *bounds[1:]]


def _numel(box: Bounds) -> int:
    return math.prod(high - low for low, high in box)


class OwnedMatrix(SharedMatrix):
    """A stored parameter that owners step. group: the index of its settings."""

    def __init__(self, parameter: DTensor, group: int, sharers: Sharers, work: Work) -> None:
        self.parameter, self.group = parameter, group
        states = unsplit_states(stored_states(parameter))
        super().__init__(parameter.shape, states, sharers, work)

    @property
    def is_owner(self) -> bool:
        """Whether this rank steps some of it."""
        return self.sharers.own in self.owners

    def pinned(self, held: Any) -> int | None:
        """The owner that has its states already."""
        for value in pytree.tree_leaves(held):
            if isinstance(value, DTensor) and value.shape != self.shape:
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
    work, own = Work(), own_attributes(optimizer)
    settings: list[dict[str, Any]] = [{} for _ in optimizer.param_groups]
    for _ in range(2):
        written = StepProgram(optimizer, step, group, like, held, own, settings)
        held, division = written.state, written.division
        flops, nbytes, dtype = division.work()
        wholes = [x for x in division.returned if x.shape == like.shape]
        numbers = [x for x in division.returned if x.shape != like.shape]
        states = [x for x in pytree.tree_leaves(held) if isinstance(x, MatrixValue)]
        kept = [x for x in states if x.shape != like.shape and not is_number(x)]
        by_rows = written.is_parts and division.is_by_rows(like.shape)
        moments = sum(x.shape == like.shape for x in states)
        found = Work(
            flops,
            nbytes,
            dtype,
            sent=_nbytes(division.sent),
            returned=_nbytes(wholes),
            numbers=_nbytes(numbers),
            states=_nbytes(kept),
            moments=moments,
            by_rows=by_rows,
        )
        work = work if work.flops and not flops else found
    return work


def _nbytes(values: Sequence[MatrixValue]) -> int:
    return sum(x.numel() * x.dtype.itemsize for x in values)


class StepProgram:
    """A step of one matrix, as the optimizer's code writes it down.

    entries: the leaves of its state before the step: values, copies of numbers, anything else.
    state: its state then. is_parts: whether all tensors of that have the matrix's shape. lasting:
    the identities of values that are read after the operators that make them.
    """

    def __init__(
        self,
        optimizer: Any,
        step: Any,
        group: int,
        like: torch.Tensor,
        held: Any,
        own: dict[str, Any],
        settings: Sequence[dict[str, Any]] = (),
    ) -> None:
        """own: the optimizer's own attributes, as they are before a step. settings: those of groups
        that are not the optimizer's, and become what the step leaves."""
        run = MatrixStep(like.shape, like.device)
        self.parameter = run.value(like.shape, like.dtype)
        self.gradient = run.value(like.shape, like.dtype)
        held = pytree.tree_map(functools.partial(_entry, run), held)
        self.entries = pytree.tree_leaves(held)
        groups: list[list[Any]] = [[] for _ in optimizer.param_groups]
        groups[group] = [self.parameter]
        self.parameter.grad = self.gradient
        states: Any = defaultdict(dict)
        if held:
            states[self.parameter] = held
        proxy = proxy_of(optimizer, groups, states)
        proxy.__dict__.update(copy.deepcopy(own))
        for given, chosen in zip(settings, proxy.param_groups):
            chosen.update(given)
        for chosen in proxy.param_groups:
            for name, value in chosen.items():
                if isinstance(value, torch.Tensor):
                    chosen[name] = value.detach().clone()
        with compat.plain_attributes(), run:
            step(proxy)
        for given, chosen in zip(settings, proxy.param_groups):
            given.update({name: value for name, value in chosen.items() if name != "params"})
        self.state: Any = proxy.state.get(self.parameter, {})
        leaves = [x for x in pytree.tree_leaves(self.state) if isinstance(x, MatrixValue)]
        before = [x for x in self.entries if isinstance(x, MatrixValue)]
        self.is_parts = all(x.shape == like.shape for x in (*before, *leaves))
        self.division = run.divide(leaves, [self.parameter, *before])
        kept = (self.parameter, *before, *leaves, *self.division.returned)
        self.lasting = {id(x) for x in kept} | {
            id(x) for operator in self.division.after for x in operator.values if x.on_parts
        }


def _entry(run: MatrixStep, x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    if is_number(x) and not isinstance(x, MatrixValue):
        return x.full_tensor() if isinstance(x, DTensor) else x.detach().clone()
    return run.value(x.shape, x.dtype)


def program_key(
    group: int, like: torch.Tensor, held: Any, own: Any, settings: Any
) -> tuple[Any, ...] | None:
    """Equal where a step writes the same down; None where reading a number takes a device's time.

    own, settings: the optimizer's attributes, and those of its groups.
    """
    leaves, spec = pytree.tree_flatten((held, own, settings))
    kinds: list[Any] = []
    for x in leaves:
        if not isinstance(x, torch.Tensor):
            kinds.append((type(x), x))
        elif not is_number(x):
            kinds.append((tuple(x.shape), x.dtype))
        elif x.device.type != "cpu" or isinstance(x, DTensor):
            return None
        else:
            kinds.append((x.shape, x.dtype, x.item()))
    return group, like.shape, like.dtype, like.device, spec, tuple(kinds)


def assign_owners(
    matrices: Sequence[SharedMatrix], pinned: Sequence[int | None], rates: Rates
) -> float:
    """Balances the seconds of matrices over their sharers; those of the rank with the most.

    pinned: of each the owner that it has already. Stacks go to those who hold them, by matrix.
    """
    most = 0.0
    for alike in by_sharers(matrices):
        given = [0.0] * len(alike[0].sharers.ranks)
        known = {id(matrix): place for matrix, place in zip(matrices, pinned)}
        free = []
        for matrix in alike:
            place = known[id(matrix)]
            if place is not None:
                matrix.own(place)
                given[place] += matrix.seconds(rates)
            elif matrix.work.by_rows:
                matrix.spread(given, rates)
            else:
                free.append(matrix)
        found = balanced([matrix.seconds(rates) for matrix in free], given)
        for matrix, owner in zip(free, found.owners):
            matrix.own(owner)
        most = max(most, found.seconds)
    return most


def by_sharers(matrices: Sequence[Matrix]) -> Iterator[list[Matrix]]:
    """The matrices of each set of ranks."""
    groups: dict[tuple[int, ...], list[Matrix]] = {}
    for matrix in matrices:
        groups.setdefault(matrix.sharers.ranks, []).append(matrix)
    yield from groups.values()


def buckets_of(matrices: Sequence[OwnedMatrix], limit: int = BUCKET) -> list[list[OwnedMatrix]]:
    """Matrices that travel together: of each owner as many as of the others, the longest first."""
    turns: dict[int, int] = defaultdict(int)
    ranked = []
    for matrix in sorted(matrices, key=lambda m: -m.work.flops):
        first = matrix.owners[0]
        ranked.append((turns[first], matrix))
        turns[first] += 1
    buckets: list[list[OwnedMatrix]] = []
    held: dict[int, float] = {}
    for _, matrix in sorted(ranked, key=lambda each: each[0]):
        whole = max(matrix.work.sent, matrix.work.returned)
        takes = {place: whole * matrix.share(place) for place in matrix.owners}
        if not buckets or any(
            place in held and held[place] + nbytes > limit for place, nbytes in takes.items()
        ):
            buckets.append([])
            held = {}
        held.update({place: held.get(place, 0.0) + takes[place] for place in takes})
        buckets[-1].append(matrix)
    return buckets
