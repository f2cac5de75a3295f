"""No comparison loses a NaN: `max` and `>` pass over one that does not come first.

Errors are gathered by `furthest` (autoshard/verification/comparison.py), or each is compared by `<`
in an assert, which a NaN fails.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_MEASURES = re.compile(r"abs|norm|difference\w*|error\w*|excess|differences|errors|worst\w*|off")
_BOUNDS = re.compile(r"(?i)tolerance|limit|bound|eps|allowed")
_SIZES = re.compile(r"(self\.)?(peak|highest|most)")  # bytes, which are never NaN
_ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def _names(node: ast.AST) -> Iterator[str]:
    """Names, attributes and keys that are read below a node."""
    for each in ast.walk(node):
        match each:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                yield name
            case ast.Subscript(slice=ast.Constant(value=str(name))):
                yield name


def _is_call(node: ast.AST, *names: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


def _is_bound(node: ast.AST) -> bool:
    """Whether what errors are held against: a float, or a name that says so."""
    return any(isinstance(n, ast.Constant) and type(n.value) is float for n in ast.walk(node)) or (
        any(_BOUNDS.search(name) for name in _names(node))
    )


def _measures(node: ast.Call) -> bool:
    """Whether one of its arguments is how far something is off; a yardstick is not."""
    names = {name for arg in node.args for name in _names(arg)}
    return "finite" not in names and any(map(_MEASURES.fullmatch, names))


def _orders(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """(smaller, larger) of each comparison by < or > in this expression."""
    if isinstance(node, ast.Compare):
        for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators):
            if isinstance(op, _ORDERS):
                yield (left, right) if isinstance(op, ast.Lt | ast.LtE) else (right, left)


def _exceeds(node: ast.AST) -> bool:
    """Whether it is true of what is above a bound, which NaN is not."""
    return any(_is_bound(a) and not _is_call(b, "furthest", "len") for a, b in _orders(node))


def _running(node: ast.AST) -> bool:
    """`if a > b: b = a`."""
    match node:
        case ast.If(test=ast.Compare() as test, body=[ast.Assign(targets=targets), *_]):
            sides = {ast.unparse(side) for pair in _orders(test) for side in pair}
            written = [t for target in targets for t in getattr(target, "elts", [target])]
            return any(ast.unparse(target) in sides for target in written)
    return False


def _refuses(node: ast.AST) -> bool:
    """`if error > tolerance: raise`, and the like."""
    if not isinstance(node, ast.If) or not _exceeds(node.test):
        return False
    inside = [each for line in node.body for each in ast.walk(line)]
    calls = {getattr(n.func, "attr", None) for n in inside if isinstance(n, ast.Call)}
    return any(isinstance(n, ast.Raise | ast.Return) for n in inside) or bool(
        calls & {"fail", "append"}
    )


def _denied(node: ast.AST) -> bool:
    """`assert not error > tolerance`, also of any."""
    match node:
        case ast.Assert(test=ast.UnaryOp(op=ast.Not(), operand=operand)):
            return any(_exceeds(each) for each in ast.walk(operand))
    return False


def _listed(node: ast.AST) -> bool:
    """`[name for name, error in errors if error > tolerance]`."""
    parts: list[ast.comprehension] = getattr(node, "generators", [])
    return any(_exceeds(test) for part in parts for test in part.ifs)


def _largest(node: ast.AST) -> bool:
    """`max` of errors, as their value or beside a bound; `sorted(errors)[-1]`."""
    match node:
        case ast.Subscript(value=ast.Call() as call) if _is_call(call, "sorted"):
            return _measures(call)
        case ast.Call() if _is_call(node, "max"):
            floor = any(isinstance(a, ast.Constant) for a in node.args)
            return _measures(node) and not floor
        case ast.Assign(targets=[target], value=value):
            calls = [each for each in ast.walk(value) if _is_call(each, "max")]
            own = ast.unparse(target) if calls else ""
            again = any(own == ast.unparse(a) for c in calls for a in ast.walk(c))
            return again and not _SIZES.fullmatch(own)
    return any(
        (_is_call(a, "max") and _is_bound(b)) or (_is_call(b, "min") and _is_bound(a))
        for a, b in _orders(node)
    )


def _erased(node: ast.AST) -> bool:
    """`nan_to_num`, `nanmean` and the like, which make a number of a NaN."""
    return isinstance(node, ast.Attribute) and re.fullmatch(r"nan_?\w+", node.attr) is not None


RULES: dict[str, Callable[[ast.AST], bool]] = {
    "use furthest, not max": _largest,
    "use furthest, not a running maximum": _running,
    "ask whether the error is below": _refuses,
    "assert that the error is below": _denied,
    "ask which are not below": _listed,
    "keep the NaN": _erased,
}


def losing(source: str) -> list[str]:
    """The lines that would lose a NaN, with what to write."""
    return [
        f"{node.lineno}: {rule}: {ast.unparse(node)[:90]}"
        for node in ast.walk(ast.parse(source))
        for rule, loses in RULES.items()
        if loses(node)
    ]


def test_no_comparison_loses_a_nan() -> None:
    files = [f for name in ("tests", "benchmarks") for f in sorted((ROOT / name).rglob("*.py"))]
    found = [f"{f.relative_to(ROOT)}:{line}" for f in files for line in losing(f.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "worst = max(worst, float(x))",
        "self.loss = max(self.loss, one)",
        "found['a'], where = max((found['a'], where), (one, name))",
        "total = max(float((a - b).abs().max()) for a, b in pairs)",
        "return_ = {'gradient': max(differences)}",
        "assert max(found.values()) < 1e-6",
        "assert max(found) <= TOLERANCE",
        "assert 0.9 < min(shares)",
        "assert sorted(errors)[-1] < TOLERANCE",
        "if error > worst['gradient']:\n    worst['gradient'], where = error, key",
        "if error > 1e-5:\n    raise AssertionError",
        "if limit < off:\n    wrong.append(name)",
        "assert not error > tolerance",
        "assert not any(one > 1e-5 for one in found)",
        "wrong = [name for name, error in found if error > tolerance]",
        "found = x.nan_to_num().norm()",
    ],
)
def test_what_would_lose_one_is_found(source: str) -> None:
    assert losing(source)


@pytest.mark.parametrize(
    "source",
    [
        "assert furthest(errors) < 1e-6",
        "worst = furthest([worst, error])",
        "assert error < TOLERANCE and (a - b).abs().max() < 1e-5",
        "assert all(error < 1e-5 for error in errors)",
        "wrong = [name for name, error in found if not error <= tolerance]",
        "assert max(map(len, lines)) <= 80 and memory.peak == max(m.bytes for m in moments)",
        "if n > 1:\n    raise ValueError",
    ],
)
def test_what_keeps_it_is_not(source: str) -> None:
    assert not losing(source)
