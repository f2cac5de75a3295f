"""Small faults of one source file, as a slip of the hand makes them: a change of a few letters.

A fault is a change of the syntax tree that leaves a program: a comparison turned round, a condition
negated, a term or a factor dropped, an index shifted, a call left out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

_TURNED = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
_BINARY = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod)
_OTHER_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
_OTHER_TEXTS = {"sum": "max", "avg": "sum", "max": "sum"}
_LEFT_OUT = ("wait", "synchronize", "record", "clear", "clone", "detach", "contiguous", "add_")


class Change(NamedTuple):
    """A fault. kind: in a word or two; line, and start and end among the bytes of the source, of
    what `new` takes the place of."""

    kind: str
    line: int
    start: int
    end: int
    new: str

    def of(self, source: str) -> str:
        """The source with the fault."""
        data = source.encode()
        return (data[: self.start] + self.new.encode() + data[self.end :]).decode()


def changes(source: str) -> list[Change]:
    """Every fault of a source, by their places; none in types, docstrings and what is raised."""
    starts, at = [0], 0
    for line in source.encode().splitlines(keepends=True):
        at += len(line)
        starts.append(at)

    def made(kind: str, node: ast.expr | ast.stmt, new: str) -> Change:
        start = starts[node.lineno - 1] + node.col_offset
        assert node.end_lineno is not None and node.end_col_offset is not None
        return Change(
            kind, node.lineno, start, starts[node.end_lineno - 1] + node.end_col_offset, new
        )

    found = {
        made(kind, target, new)
        for node in _code(ast.parse(source))
        for target, kind, new in _faults(node)
    }
    return sorted(found, key=lambda one: (one.start, one))


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run and decide something."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "msg", "type_params"):
            continue
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ast.Raise | ast.JoinedStr) or not isinstance(each, ast.AST):
                continue
            if isinstance(each, ast.If) and "TYPE_CHECKING" in ast.unparse(each.test):
                continue
            yield each
            yield from _code(each)


def _faults(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str, str]]:
    """(what is replaced, kind, text in its place)."""

    def text(one: ast.AST) -> str:
        return f"({ast.unparse(one)})"

    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            turned = f"({ast.unparse(left)} {_TURNED[type(op)]} {ast.unparse(right)})"
            yield node, "comparison", turned
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            yield test, "condition negated", f"(not {text(test)})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, "not dropped", text(operand)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            yield node, "sign dropped", text(operand)
        case ast.BoolOp(values=values):
            yield from ((node, "condition dropped", text(one)) for one in values)
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _BINARY):
            yield from ((node, "term dropped", text(one)) for one in (left, right))
        case ast.Subscript(value=value, slice=ast.Constant(value=int(index)) as place):
            if not isinstance(index, bool):
                yield place, "index shifted", str(index + 1 if index >= 0 else index - 1)
        case ast.Constant(value=bool(value)):
            yield node, "flag turned", str(not value)
        case ast.Constant(value=str(value)) if value in _OTHER_TEXTS:
            yield node, "reduction", repr(_OTHER_TEXTS[value])
        case ast.Call(func=ast.Name(id=name) as function, args=[_, *_]) if name in _OTHER_NAMES:
            yield function, "reduction", _OTHER_NAMES[name]
        case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in _LEFT_OUT:
            yield node, "call left out", text(value)
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield node, "statement left out", "pass"
        case ast.Return(value=ast.expr() as given) if ast.unparse(given) != "None":
            yield node, "early return", "return None"
