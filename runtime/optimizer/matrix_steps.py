"""An optimizer's step of one matrix, written down, each operator for where its operands are.

The optimizer's own code runs on values of the whole's shape without memory. Operators that are
elementwise are for parts. From the first one that is not (a product, a norm, a transposition) they
wait, and are divided when the step ends: those that something not elementwise waits for run on the
whole, at the matrix's owner; the rest on parts again, when the owner's results are back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from autoshard.runtime import compat
from autoshard.runtime.optimizer.recording import READS, is_elementwise, name_of

_FACTOR_CUBED: dict[str, float] = {
    **{"_linalg_eigh": 9, "_linalg_svd": 22, "linalg_qr": 4, "linalg_eig": 25},
    **{"linalg_inv_ex": 2, "_linalg_solve_ex": 2, "linalg_cholesky_ex": 1 / 3},
}
"""Floating-point operations of a factorisation of n x n, in n cubed (Golub and Van Loan)."""


class MatrixValue(torch.Tensor):
    """A value of a matrix's step: its shape and dtype.

    meta: what it is, without memory, with the storage that its views share. on_parts: whether every
    rank has its part of it before anything travels; it has the matrix's shape, or is a number.
    """

    step: MatrixStep
    meta: torch.Tensor
    on_parts: bool

    @staticmethod
    def of(step: MatrixStep, meta: torch.Tensor, on_parts: bool) -> MatrixValue:
        """A value of a step."""
        like = torch.empty(0, dtype=meta.dtype, device=step.device)
        made: MatrixValue = compat.wrapper_tensor(
            MatrixValue, tuple(meta.shape), like, False, meta.stride()
        )
        made.step, made.meta, made.on_parts = step, meta, on_parts
        return made

    @property
    def cell(self) -> int:
        """A number that it shares with its views."""
        return compat.storage_key(self.meta)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        step = next(
            x.step for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, MatrixValue)
        )
        return step.apply(func, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        return f"MatrixValue({tuple(self.shape)}, {self.dtype})"


@dataclass(frozen=True)
class StepOperator:
    """One that was written down. on_parts: whether it may run on parts."""

    func: Any
    args: Any
    kwargs: Any
    outs: Any
    values: list[MatrixValue]
    written: list[MatrixValue]
    on_parts: bool

    def results(self) -> list[MatrixValue]:
        """The values it makes, or writes."""
        return [x for x in pytree.tree_leaves(self.outs) if isinstance(x, MatrixValue)]

    @cached_property
    def ids(self) -> set[int]:
        """The identities of the values that it takes and makes."""
        return {id(x) for x in (*self.values, *self.results())}

    @cached_property
    def _flat(self) -> tuple[list[Any], Any, list[Any]]:
        leaves, spec = pytree.tree_flatten((self.args, self.kwargs))
        lists = any(isinstance(x, (list, tuple, dict)) for x in (*self.args, *self.kwargs.values()))
        return leaves, spec if lists else None, pytree.tree_leaves(self.outs)

    def run(self, known: dict[int, torch.Tensor], rows: Rows | None = None) -> None:
        """Run it on tensors, by the identity of the values they stand for.

        rows: of a stack, how many matrices those have and the whole has.
        """
        leaves, spec, outs = self._flat
        given = [known[id(x)] if type(x) is MatrixValue else x for x in leaves]
        if spec is not None:
            args, kwargs = pytree.tree_unflatten(given, spec)
        else:
            count = len(self.args)
            args, kwargs = given[:count], dict(zip(self.kwargs, given[count:]))
        if rows is not None and (at := self.size_at(rows.all)) is not None:
            args = [*args[:at], [rows.here, *args[at][1:]], *args[at + 1 :]]
        found = self.func(*args, **kwargs)
        made = [found] if isinstance(found, torch.Tensor) else pytree.tree_leaves(found)
        for value, tensor in zip(outs, made):
            if type(value) is MatrixValue:
                known[id(value)] = tensor

    def size_at(self, count: int) -> int | None:
        """Which of its arguments is a size that begins with this number."""
        args = enumerate(self.args) if name_of(self.func) in _SIZED else ()
        sizes = [at for at, x in args if isinstance(x, (list, tuple)) and list(x[:1]) == [count]]
        return sizes[0] if sizes else None

    def flops(self) -> float:
        """Of one that runs on wholes."""
        packet = getattr(getattr(torch.ops, self.func.namespace), name_of(self.func))
        metas = pytree.tree_map(_meta, (self.args, self.kwargs, self.outs))
        if packet in flop_registry:
            return float(flop_registry[packet](*metas[0], **metas[1], out_val=metas[2]))
        cubed = _FACTOR_CUBED.get(name_of(self.func))
        if cubed is not None:
            *batch, rows, columns = metas[0][0].shape
            return float(cubed * math.prod(batch) * max(rows, columns) * min(rows, columns) ** 2)
        return 0.0

    def nbytes(self) -> int:
        """Read and written by one that runs on wholes; by a view: none."""
        results = self.results()
        cells = {value.cell for value in self.values}
        if not self.written and all(value.cell in cells for value in results):
            return 0
        return sum(x.numel() * x.dtype.itemsize for x in (*self.values, *results))


class Rows(NamedTuple):
    """Of a stack of matrices, those that are here and all."""

    here: int
    all: int


class Division(NamedTuple):
    """Where the operators that were written down run.

    before, at_owner, after: on parts, on the whole, and on parts again, in the order of the step.
    sent: values of which the owner needs the whole. returned: values of which every rank needs its
    part, or the number, when the owner is done.
    """

    before: list[StepOperator]
    at_owner: list[StepOperator]
    after: list[StepOperator]
    sent: list[MatrixValue]
    returned: list[MatrixValue]

    def work(self) -> tuple[float, int, torch.dtype]:
        """Floating-point operations and bytes of memory of what the owner runs, and the dtype of
        its products."""
        flops = [operator.flops() for operator in self.at_owner]
        products = [op.values[0].dtype for op, n in zip(self.at_owner, flops) if n and op.values]
        nbytes = sum(operator.nbytes() for operator in self.at_owner)
        return sum(flops), nbytes, products[0] if products else torch.float32

    def is_by_rows(self, shape: torch.Size) -> bool:
        """Whether what the owner makes of one matrix of a stack depends on that one alone."""
        stacked = {id(x) for x in self.sent}
        known = set(stacked)
        for operator in self.at_owner:
            of_stack = [x for x in operator.values if id(x) in stacked]
            if any(id(x) not in known for x in operator.values):
                return False  # a state that is not of the stack's shape
            begins = bool(of_stack) or operator.size_at(shape[0]) is not None
            if begins and not _keeps_rows(operator, of_stack, shape[0]):
                return False
            made = {id(x) for x in operator.results()}
            known |= made
            if begins:
                stacked |= made
        return all(id(x) in stacked and x.shape == shape for x in (*self.sent, *self.returned))


_VIEWS = {"view", "_unsafe_view", "reshape"}
_MADE = {"zeros", "ones", "full", "empty"}
_SIZED = {"expand", *_VIEWS, *_MADE, *(f"new_{name}" for name in _MADE)}
_BATCHED = {"bmm", "baddbmm", *_FACTOR_CUBED}
_REDUCTIONS = {"linalg_vector_norm", "norm", "sum", "mean", "amax", "amin", "var", "std"}


def _keeps_rows(operator: StepOperator, stacked: Sequence[MatrixValue], count: int) -> bool:
    """Whether an operator leaves the first dim of the values of a stack alone; of none of them,
    makes a stack of equal matrices."""
    name, results, own = name_of(operator.func), operator.results(), {id(x) for x in stacked}
    rank = (*stacked, *results)[0].dim()
    others = [x for x in operator.values if id(x) not in own]
    if any(x.dim() != rank for x in stacked) or any(x.dim() >= rank and len(x) > 1 for x in others):
        return False
    if not all(x.dim() and x.shape[0] == count for x in (*stacked, *results)):
        return False
    if is_elementwise(operator.func):
        return True
    if name in _BATCHED:
        return rank > 2
    if name in _SIZED:
        return bool(stacked) if name in _VIEWS else results[0].dim() == rank
    lists = [x for x in (*operator.args, operator.kwargs.get("dim")) if isinstance(x, list)]
    if name in _REDUCTIONS:
        return any(x and all(dim % rank for dim in x) for x in lists)
    if name == "permute":
        return lists[0][0] % rank == 0
    return name == "transpose" and all(dim % rank for dim in operator.args[1:])


class MatrixStep(compat.TorchDispatchMode):
    """Writes down the operators of a step, while it is entered; none runs."""

    def __init__(self, shape: torch.Size, device: torch.device) -> None:
        super().__init__()
        self.shape, self.device = shape, device
        self.before: list[StepOperator] = []
        self.waiting: list[StepOperator] = []
        self._touched: set[int] = set()
        self._written: set[int] = set()

    def value(self, shape: torch.Size, dtype: torch.dtype) -> MatrixValue:
        """One that the step is given: of the matrix's shape, of which every rank has its part; of
        another one, which the owner has."""
        meta = torch.empty(shape, dtype=dtype, device="meta")
        return MatrixValue.of(self, meta, shape == self.shape)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if not any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves((args, kwargs))):
            made = _on_metas(func, args, kwargs, self.device)
            if not isinstance(made, torch.Tensor) or is_number(made):
                return func(*args, **kwargs)
            return self.apply(func, args, kwargs)
        if any(isinstance(x, MatrixValue) for x in pytree.tree_leaves((args, kwargs))):
            return self.apply(func, args, kwargs)
        return func(*args, **kwargs)

    def apply(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Write an operator down; its results are values."""
        if name_of(func) in READS:
            raise NotImplementedError(f"{name_of(func)} reads a number of it on the host")
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotImplementedError(f"{name_of(func)} draws random numbers")
        written = _written(func, args, kwargs)
        args, kwargs = pytree.tree_map(_kept, (args, kwargs))
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        values = [x for x in tensors if isinstance(x, MatrixValue)]
        metas = _on_metas(func, args, kwargs, self.device)
        known = {id(x.meta): x for x in values}
        made = [x for x in pytree.tree_leaves(metas) if isinstance(x, torch.Tensor)]
        # a value of another shape is, by parts, of one number; so is what the optimizer has made
        plain = all(x.numel() == 1 for x in tensors if not isinstance(x, MatrixValue))
        alike = all(x.shape == self.shape or x.numel() == 1 for x in values)
        fits = alike and plain and all(x.shape == self.shape for x in made)
        on_parts = bool(values) and is_elementwise(func) and fits
        ready = on_parts and self._is_ready(values, written)

        def value_of(meta: Any) -> Any:
            if not isinstance(meta, torch.Tensor):
                return meta
            return known[id(meta)] if id(meta) in known else MatrixValue.of(self, meta, ready)

        outs = pytree.tree_map(value_of, metas)
        done = StepOperator(func, args, kwargs, outs, values, written, on_parts)
        if ready:
            self.before.append(done)
            return outs
        self.waiting.append(done)
        self._touched |= {x.cell for x in (*values, *done.results())}
        self._written |= {x.cell for x in written}
        return outs

    def _is_ready(self, values: Sequence[MatrixValue], written: Sequence[MatrixValue]) -> bool:
        """Whether parts of all are here, and what waits reads none of what would be written."""
        here = all(x.on_parts and x.cell not in self._written for x in values)
        return here and not any(x.cell in self._touched for x in written)

    def divide(self, kept: Sequence[MatrixValue], lasting: Sequence[MatrixValue]) -> Division:
        """Where the operators run. kept: the values that are the matrix's state from now on.
        lasting: those that the step was given, beside the gradient: what is written to them stays.
        """
        touched: set[int] = set()
        written: set[int] = set()
        at_owner: list[StepOperator] = []
        after: list[StepOperator] = []
        for operator in reversed(self.waiting):
            every = {x.cell for x in (*operator.values, *operator.results())}
            makes = {x.cell for x in (*operator.written, *operator.results())}
            if operator.on_parts and not makes & touched and not every & written:
                after.append(operator)
                continue
            at_owner.append(operator)
            touched |= every
            written |= {x.cell for x in operator.written}
        at_owner.reverse()
        after.reverse()
        stored = [x for x in kept if x.shape == self.shape or is_number(x)]
        at_owner, after = _fewest_returned(at_owner, after, stored)
        sent = _unique(x for op in at_owner for x in op.values if x.on_parts)
        read = [x for op in after for x in op.values]
        returned = _returned(at_owner, after, stored)
        rewritten = {x.cell for op in at_owner for x in op.written}
        back = (*read, *stored, *lasting)
        parts = _unique((x for x in back if x.on_parts and x.cell in rewritten), True)
        if len({x.cell for x in returned}) < len(returned):
            raise NotImplementedError("it takes two views of a result apart")
        return Division(self.before, at_owner, after, sent, [*returned, *parts])


def _returned(
    at_owner: Sequence[StepOperator], after: Sequence[StepOperator], stored: Sequence[MatrixValue]
) -> list[MatrixValue]:
    """The values that the owner makes, and operators on parts or the state read."""
    made = {id(x) for op in at_owner for x in op.results() if not x.on_parts}
    read = [x for op in after for x in op.values]
    return _unique(x for x in (*read, *stored) if id(x) in made)


def _fewest_returned(
    at_owner: list[StepOperator], after: list[StepOperator], stored: Sequence[MatrixValue]
) -> tuple[list[StepOperator], list[StepOperator]]:
    """Have the owner run, of what may run on parts, what makes one value of several that would
    travel: the sum of Newton-Schulz's last product and its operand."""

    def nbytes(at_owner: list[StepOperator], after: list[StepOperator]) -> int:
        found = _returned(at_owner, after, stored)
        return sum(x.numel() * x.dtype.itemsize for x in found)

    known = {id(x) for op in at_owner for x in op.results() if not x.on_parts}
    best, moved = (at_owner, after), at_owner
    for operator in after:
        if operator.written or not all(id(x) in known for x in operator.values):
            continue
        known |= {id(x) for x in operator.results()}
        moved = [*moved, operator]
        rest = [op for op in after if not any(op is each for each in moved)]
        if nbytes(moved, rest) < nbytes(*best):
            best = moved, rest
    return best


def is_number(x: torch.Tensor) -> bool:
    """Whether every rank has a tensor of its own: a counter, a rate; no matrix of one element."""
    return x.numel() == 1 and x.dim() < 2


def _unique(values: Iterator[MatrixValue] | Any, by_cell: bool = False) -> list[MatrixValue]:
    return list({x.cell if by_cell else id(x): x for x in values}.values())


def _meta(x: Any) -> Any:
    if isinstance(x, MatrixValue):
        return x.meta
    return x.to("meta") if isinstance(x, torch.Tensor) else x


def _kept(x: Any) -> Any:
    """An operand as it is now: what the step counts in, it changes later."""
    plain = isinstance(x, torch.Tensor) and not isinstance(x, MatrixValue)
    return x.detach().clone() if plain else x


def _on_metas(func: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
    """What an operator makes of values without memory."""
    asked = kwargs.get("device")
    if asked is not None:
        if torch.device(asked).type != device.type:
            raise NotImplementedError(f"{name_of(func)} moves it to {asked}")
        kwargs = {**kwargs, "device": torch.device("meta")}
    elif not any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves((args, kwargs))):
        kwargs = {**kwargs, "device": torch.device("meta")}
    args, kwargs = pytree.tree_map(_meta, (args, kwargs))
    return func(*args, **kwargs)


def _written(func: Any, args: Any, kwargs: Any) -> list[MatrixValue]:
    found = [x for x in compat.written_by(func, args, kwargs) if isinstance(x, torch.Tensor)]
    values = [x for x in found if isinstance(x, MatrixValue)]
    if len(values) < len(found):
        raise NotImplementedError(f"{name_of(func)} writes to what every rank has of its own")
    return values
