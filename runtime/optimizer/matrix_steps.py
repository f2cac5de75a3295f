"""An optimizer's step of one matrix, of which each operator runs where its operands are.

The optimizer's own code runs on values of the whole's shape, which hold this rank's part. Operators
that are elementwise run on the part at once. From the first one that is not (a product, a norm, a
transposition) they are written down, and divided when the step ends: those that something not
elementwise waits for run on the whole, at the matrix's owner; the rest on parts again, when the
owner's results are back. Nothing is kept from step to step: numbers are those of this step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
    """A value of a matrix's step: its shape and dtype, and this rank's part where it has one.

    meta: what it is, without memory, with the storage that its views share. local: this rank's part
    of a value of the matrix's shape; None: of one that only the owner, or nobody yet, has.
    """

    step: MatrixStep
    meta: torch.Tensor
    local: torch.Tensor | None

    @staticmethod
    def of(step: MatrixStep, meta: torch.Tensor, local: torch.Tensor | None) -> MatrixValue:
        """A value of a step."""
        like = torch.empty(0, dtype=meta.dtype, device=step.device)
        made: MatrixValue = compat.wrapper_tensor(
            MatrixValue, tuple(meta.shape), like, False, meta.stride()
        )
        made.step, made.meta, made.local = step, meta, local
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


class StepOperator(NamedTuple):
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

    def run(self, known: dict[int, torch.Tensor]) -> None:
        """Run it on tensors, by the identity of the values they stand for."""

        def real(x: Any) -> Any:
            return known[id(x)] if isinstance(x, MatrixValue) else x

        found = self.func(*pytree.tree_map(real, self.args), **pytree.tree_map(real, self.kwargs))
        for value, tensor in zip(pytree.tree_leaves(self.outs), pytree.tree_leaves(found)):
            if isinstance(value, MatrixValue):
                known[id(value)] = tensor

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


class Division(NamedTuple):
    """Where the operators that were written down run.

    at_owner, on_parts: in the order of the step. sent: values of which the owner needs the whole.
    returned: values of which every rank needs its part, or the number, when the owner is done.
    """

    at_owner: list[StepOperator]
    on_parts: list[StepOperator]
    sent: list[MatrixValue]
    returned: list[MatrixValue]

    def work(self) -> tuple[float, int]:
        """Floating-point operations and bytes of memory of what the owner runs."""
        flops = sum(operator.flops() for operator in self.at_owner)
        return flops, sum(operator.nbytes() for operator in self.at_owner)


class MatrixStep(compat.TorchDispatchMode):
    """Runs and writes down the operators of a step, while it is entered.

    dry: no operator runs; parts are of the whole's shape and without memory.
    """

    def __init__(self, shape: torch.Size, device: torch.device, dry: bool = False) -> None:
        super().__init__()
        self.shape, self.device, self.dry = shape, device, dry
        self.operators: list[StepOperator] = []
        self._touched: set[int] = set()
        self._written: set[int] = set()

    def part(self, local: torch.Tensor) -> MatrixValue:
        """A value of the matrix's shape, of which `local` is this rank's part."""
        meta = torch.empty(self.shape, dtype=local.dtype, device="meta")
        return MatrixValue.of(self, meta, meta if self.dry else local)

    def owned(self, shape: torch.Size, dtype: torch.dtype) -> MatrixValue:
        """A value that the owner has."""
        return MatrixValue.of(self, torch.empty(shape, dtype=dtype, device="meta"), None)

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
        """Run an operator on parts, or write it down; its results are values."""
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        values = [x for x in tensors if isinstance(x, MatrixValue)]
        if name_of(func) in READS:
            raise NotImplementedError(f"{name_of(func)} reads a number of it on the host")
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotImplementedError(f"{name_of(func)} draws random numbers")
        metas = _on_metas(func, args, kwargs, self.device)
        known = {id(x.meta): x for x in values}
        made = [x for x in pytree.tree_leaves(metas) if isinstance(x, torch.Tensor)]
        # a value of another shape is, by parts, of one number; so is what the optimizer has made
        plain = all(x.numel() == 1 for x in tensors if not isinstance(x, MatrixValue))
        alike = all(x.shape == self.shape or x.numel() == 1 for x in values)
        fits = alike and plain and all(x.shape == self.shape for x in made)
        on_parts = bool(values) and is_elementwise(func) and fits
        written = _written(func, args, kwargs)
        if on_parts and self._is_ready(values, written):
            parts = metas
            if not self.dry:
                real = pytree.tree_map(_local, (args, kwargs))
                parts = func(*real[0], **real[1])
            locals_of = pytree.tree_leaves(parts)
        else:
            locals_of = [None] * len(pytree.tree_leaves(metas))
        remaining = iter(locals_of)

        def value_of(meta: Any) -> Any:
            local = next(remaining)
            if not isinstance(meta, torch.Tensor):
                return meta
            return known[id(meta)] if id(meta) in known else MatrixValue.of(self, meta, local)

        outs = pytree.tree_map(value_of, metas)
        if any(local is not None for local in locals_of):
            return outs
        done = StepOperator(func, args, kwargs, outs, values, written, on_parts)
        self.operators.append(done)
        self._touched |= {x.cell for x in (*values, *done.results())}
        self._written |= {x.cell for x in written}
        return outs

    def _is_ready(self, values: Sequence[MatrixValue], written: Sequence[MatrixValue]) -> bool:
        """Whether parts of all are here, and what waits reads none of what would be written."""
        here = all(x.local is not None and x.cell not in self._written for x in values)
        return here and not any(x.cell in self._touched for x in written)

    def divide(self, kept: Sequence[MatrixValue], lasting: Sequence[MatrixValue]) -> Division:
        """Where the operators run. kept: the values that are the matrix's state from now on.
        lasting: those that the step was given, beside the gradient: what is written to them stays.
        """
        touched: set[int] = set()
        written: set[int] = set()
        at_owner: list[StepOperator] = []
        on_parts: list[StepOperator] = []
        for operator in reversed(self.operators):
            every = {x.cell for x in (*operator.values, *operator.results())}
            makes = {x.cell for x in (*operator.written, *operator.results())}
            if operator.on_parts and not makes & touched and not every & written:
                on_parts.append(operator)
                continue
            at_owner.append(operator)
            touched |= every
            written |= {x.cell for x in operator.written}
        at_owner.reverse()
        on_parts.reverse()
        sent = _unique(x for op in at_owner for x in op.values if x.local is not None)
        made = {id(x) for op in at_owner for x in op.results() if x.local is None}
        stored = [x for x in kept if x.shape == self.shape or is_number(x)]
        read = [x for op in on_parts for x in op.values]
        returned = _unique(x for x in (*read, *stored) if id(x) in made)
        rewritten = {x.cell for op in at_owner for x in op.written}
        back = (*read, *stored, *lasting)
        parts = _unique((x for x in back if x.local is not None and x.cell in rewritten), True)
        if len({x.cell for x in returned}) < len(returned):
            raise NotImplementedError("it takes two views of a result apart")
        return Division(at_owner, on_parts, sent, [*returned, *parts])


def is_number(x: torch.Tensor) -> bool:
    """Whether every rank has a tensor of its own: a counter, a rate; no matrix of one element."""
    return x.numel() == 1 and x.dim() < 2


def _unique(values: Iterator[MatrixValue] | Any, by_cell: bool = False) -> list[MatrixValue]:
    return list({x.cell if by_cell else id(x): x for x in values}.values())


def _meta(x: Any) -> Any:
    if isinstance(x, MatrixValue):
        return x.meta
    return x.to("meta") if isinstance(x, torch.Tensor) else x


def _local(x: Any) -> Any:
    return x.local if isinstance(x, MatrixValue) else x


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
