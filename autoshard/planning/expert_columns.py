"""Where the body of a mixture of experts may be split inside each expert: along its inner dim.

The body (runtime/operators/expert_body.py) is followed value by value. A product of whole rows
makes columns, which a rank may hold a share of, as long as everything up to the next product is
elementwise; that product sums over them. Halves of packed columns, [gate | up], are split alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from autoshard.runtime.collectives import P, S, State
from autoshard.runtime.operators import ELEMENT, STACK, Body, Instruction

Shape = tuple[int, ...]

_SPLITS = ("aten.split.Tensor", "aten.split_with_sizes.default", "aten.chunk.default")
_TERMS = ("aten.add.Tensor", "aten.sub.Tensor")
_FACTORS = ("aten.mul.Tensor", "aten._to_copy.default", "aten.clone.default", "aten.neg.default")
_ALIGNED = "aten._grouped_mm.default"  # of which every row starts at a multiple of 16 bytes
_ALIGNMENT = 16
_SEVERAL = 2  # columns of the rows: more than the one that goes with any others


class InnerSplit(NamedTuple):
    """The way to split each expert.

    states: of each stack. packed: (stack, dim, sizes of its parts) of those that hold several
    parts, one behind the other. body: the one of a rank.
    """

    states: tuple[State, ...]
    packed: tuple[tuple[int, int, tuple[int, ...]], ...]
    body: Body


class _Unsplit(Exception):
    """The body cannot be split; the text says why."""


@dataclass(frozen=True)
class _Columns:
    """What is known of one value.

    kind: "whole", "split" along its columns, "partial", "parts" of a split value, "stack", "bias".
    width: columns, 0 where it has none. stack: which one, and the order of its dims. makers: the
    stacks whose columns these are, in their order; none once they are taken apart.
    """

    kind: str
    width: int = 0
    stack: int = -1
    dims: tuple[int, ...] = ()
    makers: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


@dataclass
class _Reading:
    shapes: Sequence[Shape]
    n: int
    itemsize: int
    values: dict[str, _Columns] = field(default_factory=dict)
    states: dict[int, State] = field(default_factory=dict)
    packed: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    whole: set[int] = field(default_factory=set)  # stacks whose columns are not taken apart
    instructions: list[Instruction] = field(default_factory=list)

    # Values

    def of(self, name: object) -> _Columns:
        if not isinstance(name, str) or not name.startswith("%"):
            return _Columns("number")
        if name in self.values:
            return self.values[name]
        if name.startswith(STACK) and name[len(STACK) :].isdigit():
            stack = int(name[len(STACK) :])
            return _Columns("stack", 0, stack, tuple(range(len(self.shapes[stack]))))
        return _Columns("whole")

    def set_state(self, stack: int, state: State) -> None:
        if self.states.setdefault(stack, state) != state:
            raise _Unsplit(f"stack {stack} is read as {self.states[stack]} and as {state}")

    # Instructions

    def follow(self, body: Body) -> None:
        for i, one in enumerate(body.instructions):
            operands = [self.of(name) for name in one.reads()]
            changed = one
            if one.is_product:
                made = self._product(one, operands)
            elif operands[0].kind == "stack":
                made = self._of_stack(one, operands)
            elif one.op in _SPLITS and operands[0].kind == "split":
                made, changed = self._taken_apart(one, operands[0])
            elif one.op == ELEMENT and operands[0].kind == "parts":
                made = _Columns("split", operands[0].sizes[one.args[1]])
            elif one.op == "aten.slice.Tensor" and operands[0].kind == "split":
                made = self._strided(one, operands[0])
            else:
                made = self._by_row(one, operands)
            self.values[f"%{i}"] = made
            self.instructions.append(changed)
        if self.values[f"%{len(body.instructions) - 1}"].kind != "partial":
            raise _Unsplit("the last product does not sum over what the first ones make")

    def _product(self, one: Instruction, operands: list[_Columns]) -> _Columns:
        rows, stack = operands[:2]
        if len(one.args) > 3 and any(each is not None for each in one.args[3:4]):
            raise _Unsplit("a grouped product with a bias")
        summed, made = (self.shapes[stack.stack][stack.dims[d]] for d in (1, 2))
        if rows.kind == "whole":
            share = made / self.n
            if made % self.n:
                raise _Unsplit(f"inner dim {made} % {self.n} != 0")
            if one.op == _ALIGNED and share * self.itemsize % _ALIGNMENT:
                raise _Unsplit(f"rows of {made} / {self.n} numbers are no multiple of 16 bytes")
            self.set_state(stack.stack, S(stack.dims[2]))
            return _Columns("split", made, makers=(stack.stack,))
        if rows.kind != "split":
            raise _Unsplit("a product of what is summed already")
        if rows.width != summed or summed % self.n:
            raise _Unsplit(f"inner dim {summed} % {self.n} != 0")
        if one.op == _ALIGNED and summed // self.n * self.itemsize % _ALIGNMENT:
            raise _Unsplit(f"rows of {summed} / {self.n} numbers are no multiple of 16 bytes")
        self.whole.update(rows.makers)
        self.set_state(stack.stack, S(stack.dims[1]))
        return _Columns("partial", made)

    def _of_stack(self, one: Instruction, operands: list[_Columns]) -> _Columns:
        stack = operands[0]
        dims = list(stack.dims)
        if one.op == "aten.index.Tensor":
            width = self.shapes[stack.stack][-1]
            return _Columns("bias", width, stack.stack)
        if one.op == "aten.permute.default":
            return replace(stack, dims=tuple(dims[d] for d in one.args[1]))
        a, b = one.args[1:3] if one.op == "aten.transpose.int" else (-2, -1)
        dims[a], dims[b] = dims[b], dims[a]
        return replace(stack, dims=tuple(dims))

    def _taken_apart(self, one: Instruction, rows: _Columns) -> tuple[_Columns, Instruction]:
        given, dim = one.args[1], (*one.args[2:], *dict(one.kwargs).values(), 0)[0]
        if dim not in (1, -1):
            raise _Unsplit(f"{one.op} of the rows")
        if one.op == "aten.split_with_sizes.default":
            sizes = tuple(given)
        else:
            size = -(-rows.width // given) if one.op == "aten.chunk.default" else given
            sizes = (size,) * (rows.width // size)
        if sum(sizes) != rows.width or any(size % self.n for size in sizes):
            raise _Unsplit(f"parts of {list(sizes)} % {self.n} != 0")
        if not rows.makers:
            raise _Unsplit("columns are taken apart twice")
        for stack in rows.makers:
            dim = int(self.states[stack][2:-1])
            if self.packed.setdefault(stack, (dim, sizes)) != (dim, sizes):
                raise _Unsplit("columns are taken apart in two ways")
        if one.op == "aten.chunk.default":
            return _Columns("parts", sizes=sizes), one
        own = tuple(size // self.n for size in sizes)
        local = own if one.op == "aten.split_with_sizes.default" else own[0]
        args = (one.args[0], local, *one.args[2:])
        return _Columns("parts", sizes=sizes), replace(one, args=args)

    def _strided(self, one: Instruction, rows: _Columns) -> _Columns:
        """Each second column, or each third: of a share as of the whole."""
        given: list[Any] = [*one.args[1:], *(0, 0, 1 << 62, 1)[len(one.args) - 1 :]]
        dim, start, end, step = given
        even = rows.width % (self.n * step) == 0
        all_of_them = dim in (1, -1) and 0 <= (start or 0) < step and (end or 1) >= rows.width
        if not (rows.makers and even and all_of_them):
            raise _Unsplit("a slice of the columns")
        self.whole.update(rows.makers)
        return _Columns("split", rows.width // step)

    def _by_row(self, one: Instruction, operands: list[_Columns]) -> _Columns:
        kinds = {each.kind for each in operands}
        makers = tuple(dict.fromkeys(stack for each in operands for stack in each.makers))
        if "stack" in kinds or "parts" in kinds:
            raise _Unsplit(f"{one.op} of a stack")
        if "partial" in kinds:
            return self._linear(one, operands)
        if "split" not in kinds:
            if "bias" in kinds:
                raise _Unsplit("a bias that meets no product")
            return _Columns("whole", max(each.width for each in operands))
        width = next(each.width for each in operands if each.kind == "split")
        untouched = all(each.makers for each in operands if each.kind == "split")
        for each in operands:
            if each.kind == "bias":
                if each.width != width or not untouched:
                    raise _Unsplit("a bias of other columns")
                self.set_state(each.stack, S(1))
                makers = (*makers, each.stack)
            elif each.kind == "split" and each.width != width:
                raise _Unsplit("columns of two widths")
            elif each.kind == "whole" and each.width > 1:
                raise _Unsplit("columns of the whole rows meet those of a product")
        if not untouched:
            self.whole.update(makers)
            makers = ()
        return _Columns("split", width, makers=makers)

    def _linear(self, one: Instruction, operands: list[_Columns]) -> _Columns:
        partial = [each for each in operands if each.kind == "partial"]
        others = [each for each in operands if each.kind != "partial"]
        width = partial[0].width
        if one.op in _TERMS and len(operands) == 2:
            for bias in others:
                if bias.kind != "bias":
                    raise _Unsplit("a term that is whole is added to a sum of shares")
                self.set_state(bias.stack, P)
            return _Columns("partial", width)
        divided = one.op == "aten.div.Tensor" and self.of(one.args[0]).kind == "partial"
        linear = one.op in _FACTORS or divided
        if not linear or len(partial) > 1 or any(each.kind != "whole" for each in others):
            raise _Unsplit(f"{one.op} of a sum of shares")
        return _Columns("partial", width)


def inner_split(body: Body, shapes: Sequence[Shape], n: int, itemsize: int) -> InnerSplit | str:
    """How each of n ranks holds a share of every expert; or why that is not offered.

    shapes: of the stacks. itemsize: bytes of one of their numbers.
    """
    reading = _Reading(shapes, n, itemsize)
    reading.values["%rows"] = _Columns("whole", _SEVERAL)
    try:
        reading.follow(body)
    except _Unsplit as why:
        return str(why)
    if reading.whole & reading.packed.keys():
        return "columns are used as one and taken apart"
    if len(reading.states) != len(shapes):
        return "a stack that no product reads"
    packed = tuple((i, dim, sizes) for i, (dim, sizes) in sorted(reading.packed.items()))
    states = tuple(reading.states[i] for i in range(len(shapes)))
    return InnerSplit(states, packed, Body(tuple(reading.instructions)))
