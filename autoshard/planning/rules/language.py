"""Sharding rules as one line of text.

    "* ... k, * n k, + n -> ... n"          aten.linear

An operand (in the order of the operator's tensor arguments) is a list of dims; a result likewise.

- A lower-case letter may be sharded: wherever it stands, on operands and results, the tensor is
  S(that dim). An operand without the letter is used as R. A letter missing from the results is
  summed over: the result is P.
- A name that starts with an upper-case letter is a dim that must be whole.
- `...` stands for any number of leading dims, aligned from the right as in broadcasting; each
  of them is a letter of its own. A dim of size 1 that is broadcast lacks the letter.
- `X...` stands for any number of dims that must be whole.
- `_` alone is an operand whose dims take no part (it is used whole).
- `*` marks a factor: the result is linear in it, so it may be P with the others R.
- `+` marks a term: it is added to the result, so it is P wherever the result is P.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, NoReturn

import torch

from autoshard.planning.rules.call import OpCall, differentiable
from autoshard.planning.sizes import is_one, same
from autoshard.planning.strategy import Strategy
from autoshard.runtime.collectives import P, S, State

_TOKEN = re.compile(r"\S+")
_NAME = re.compile(r"[A-Za-z]\w*|[A-Z]\w*\.\.\.")
ELLIPSIS = "..."


class Operand(NamedTuple):
    """An operand or result of a rule: its mark ("", "*" or "+") and the names of its dims."""

    mark: str
    dims: tuple[str, ...]
    whole: bool = False

    def letters(self, rank: int) -> list[str] | None:
        """A name for each of `rank` dims; None where the rank does not match."""
        at = next((i for i, dim in enumerate(self.dims) if dim.endswith(ELLIPSIS)), None)
        if at is None:
            return list(self.dims) if rank == len(self.dims) else None
        extra = rank - len(self.dims) + 1
        if extra < 0:
            return None
        # numbered from the right, so that shorter operands align as in broadcasting
        batch = [f"{self.dims[at]}{extra - 1 - i}" for i in range(extra)]
        return [*self.dims[:at], *batch, *self.dims[at + 1 :]]


class TextRule:
    """A parsed rule; calling it with a OpCall gives the strategies it offers.

    Raises ValueError from the constructor where the text is wrong: the message names the column
    and what to write instead.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        arrow = text.find("->")
        if arrow < 0 or text.find("->", arrow + 2) >= 0:
            self._fail(max(arrow, 0), 'expected one "->"', 'write "inputs -> outputs"')
        self.inputs = self._parse(0, arrow) if text[:arrow].strip() else []
        self.outputs = self._parse(arrow + 2, len(text))
        self._check(arrow + 2)

    def __repr__(self) -> str:
        return f"TextRule({self.text!r})"

    def _fail(self, position: int, problem: str, fix: str) -> NoReturn:
        raise ValueError(f'sharding rule "{self.text}", column {position + 1}: {problem}; {fix}')

    def _parse(self, start: int, end: int) -> list[Operand]:
        operands = []
        for piece in self.text[start:end].split(","):
            operands.append(self._operand(start, piece))
            start += len(piece) + 1
        return operands

    def _operand(self, offset: int, piece: str) -> Operand:
        mark = ""
        dims: list[str] = []
        for found in _TOKEN.finditer(piece):
            token, at = found.group(), offset + found.start()
            if token in ("*", "+"):
                if mark or dims:
                    self._fail(at, f'"{token}" in the middle', "put one mark in front of the dims")
                mark = token
            elif token == "_" or token == ELLIPSIS or _NAME.fullmatch(token):
                if token in dims and token[0].islower():
                    self._fail(at, f'"{token}" twice in one operand', "give each dim its own name")
                if token.endswith(ELLIPSIS) and any(dim.endswith(ELLIPSIS) for dim in dims):
                    self._fail(at, "a second ellipsis in one operand", "name the dims one by one")
                dims.append(token)
            else:
                self._fail(at, f'cannot read "{token}"', 'use names, "...", "_", "*" and "+"')
        if "_" in dims and len(dims) > 1:
            self._fail(offset, '"_" beside other dims', "name the dims in upper case instead")
        return Operand(mark, tuple(dims), dims == ["_"])

    def _check(self, offset: int) -> None:
        known = {dim for operand in self.inputs for dim in operand.dims}
        for number, output in enumerate(self.outputs):
            if output.mark or output.whole:
                self._fail(offset, f'"{output.mark or "_"}" in a result', "write dims only")
            for dim in output.dims:
                if dim not in known and (dim == ELLIPSIS or dim[0].islower()):
                    at = self.text.index(dim, offset)
                    fix = "add it to an input, or write it in upper case if it must be whole"
                    self._fail(at, f'"{dim}" is in no input', fix)
                if any(dim not in other.dims for other in self.outputs) and not dim[0].isupper():
                    at = self.text.index(dim, offset)
                    fix = "write it in all results, or in upper case"
                    self._fail(at, f'"{dim}" is in result {number} but not in all', fix)

    def check_operator(self, schema: torch.FunctionSchema) -> None:
        """Raise ValueError where the rule does not have as many tensors as the operator."""
        names = tensor_arguments(schema)
        if len(self.inputs) != len(names):
            self._fail(
                0,
                f"{schema.name} takes {len(names)} tensors ({', '.join(names)}) "
                f"but the rule has {len(self.inputs)} inputs",
                'write one input for each, "_" where its dims take no part',
            )

    def __call__(self, call: OpCall) -> Iterator[Strategy]:
        names = tensor_arguments(call.schema)
        results = call.results
        if not all(isinstance(result, torch.Tensor) for result in results):
            return
        if len(results) != len(self.outputs):
            call.decline(f"the rule has {len(self.outputs)} results, the call {len(results)}")
            return
        inputs = {name: call.tensor(name) for name in names}
        letters: dict[str, list[str]] = {}
        for name, operand in zip(names, self.inputs, strict=False):
            tensor = inputs[name]
            if tensor is not None and not operand.whole:
                found = operand.letters(tensor.dim())
                if found is None:
                    return  # another alternative of the rule speaks of this rank
                letters[name] = found
        outputs = []
        for operand, result in zip(self.outputs, results, strict=True):
            found = operand.letters(result.dim())
            if found is None:
                return
            outputs.append(found)
        marks = dict(zip(names, (operand.mark for operand in self.inputs), strict=False))
        yield from _sharded(call, inputs, letters, results, outputs, marks)
        yield from _partial(call, inputs, results, marks)


def tensor_arguments(schema: torch.FunctionSchema) -> list[str]:
    """The names of the operator's arguments that are one tensor (or none)."""
    return [a.name for a in schema.arguments if str(a.type) in ("Tensor", "Optional[Tensor]")]


def _sharded(
    call: OpCall,
    inputs: dict[str, torch.Tensor | None],
    letters: dict[str, list[str]],
    results: list[torch.Tensor],
    outputs: list[list[str]],
    marks: dict[str, str],
) -> Iterator[Strategy]:
    everywhere = [letter for found in letters.values() for letter in found]
    for letter in dict.fromkeys(everywhere):
        if letter[0].isupper():
            continue
        sizes = []
        held: dict[str, int] = {}
        for name, found in letters.items():
            tensor = inputs[name]
            if letter in found and tensor is not None:
                dim = found.index(letter)
                if not is_one(tensor.shape[dim]):
                    held[name] = dim
                    sizes.append(tensor.shape[dim])
        if not held:
            continue
        contracted = letter not in outputs[0]
        states: list[State] = []
        for found, result in zip(outputs, results, strict=True):
            if not contracted:
                sizes.append(result.shape[found.index(letter)])
            states.append(P if contracted else S(found.index(letter)))
        # sizes differ where key heads are shared by query heads: blocks must then line up
        even = not all(same(size, sizes[0]) for size in sizes)
        label = f"{call.op}: {letter}"
        if not all([call.fits(size, label, even=even) for size in sizes]):
            continue
        terms = _terms(call, inputs, marks) if contracted else []
        if contracted and (terms is None or not all(differentiable(r) for r in results)):
            call.decline(f"{label} is summed over, but the sum is not linear in a term")
            continue
        chosen: dict[str, State] = {name: S(dim) for name, dim in held.items()}
        chosen.update({name: P for name in terms or [] if name not in held})
        yield call.strategy(chosen, states if len(states) > 1 else states[0])


def _terms(
    call: OpCall, inputs: dict[str, torch.Tensor | None], marks: dict[str, str]
) -> list[str] | None:
    """The terms that are tensors; None where one cannot be partial (a number, an integer)."""
    terms = []
    for name, mark in marks.items():
        tensor = inputs[name]
        if mark != "+":
            continue
        if tensor is None:
            if call[name] not in (None, 0):
                return None
        elif not differentiable(tensor):
            return None
        else:
            terms.append(name)
    return terms


def _partial(
    call: OpCall,
    inputs: dict[str, torch.Tensor | None],
    results: list[torch.Tensor],
    marks: dict[str, str],
) -> Iterator[Strategy]:
    terms = _terms(call, inputs, marks)
    if terms is None or not all(differentiable(result) for result in results):
        return
    factors = [n for n, mark in marks.items() if mark == "*" and differentiable(inputs[n])]
    for factor in factors:
        yield call.strategy({factor: P, **dict.fromkeys(terms, P)}, P)
    if not factors and terms and "*" not in marks.values():
        yield call.strategy(dict.fromkeys(terms, P), P)


def elementwise(call: OpCall) -> Iterable[Strategy]:
    """The rule of an operator with torch.Tag.pointwise: every operand broadcasts to the result."""
    count = len(tensor_arguments(call.schema))
    rule = TextRule(", ".join(["..."] * count) + " -> " + ", ".join(["..."] * len(call.results)))
    return rule(call)


def when_zero(argument: str, text: str, otherwise: str) -> Callable[[OpCall], Iterable[Strategy]]:
    """A rule that holds where a number is zero (a fill value), and another for the rest."""
    zero, rest = TextRule(text), TextRule(otherwise)

    def rule(call: OpCall) -> Iterable[Strategy]:
        return (zero if call[argument] in (None, 0) else rest)(call)

    return rule
