"""House rules that a reader would otherwise have to remember."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("autoshard", "passes", "runtime", "tests", "examples", "benchmarks", "docs")
TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile", "pyproject.toml", ".ci/run")

#: File over 400 lines -> why it is one idea all the same.
LONG: dict[str, str] = {
    "tests/helpers/rule_samples.py": "data: one sample of arguments an operator",
}

#: Underscored modules that are used as widely as public ones, or that are operator namespaces.
WIDELY_USED = (
    "torch._C._TorchDispatchMode",
    "torch._ops",
    "torch._subclasses",
    "torch.utils._pytree",
    "torch.utils._python_dispatch",
    "torch.ops",
)
COMPAT = tuple(
    f"runtime/compat{part}.py" for part in ("", "_aot", "_dynamo", "_inductor", "_trace")
)


def sources() -> Iterator[Path]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".md", ".txt") and "__pycache__" not in path.parts:
                yield path
    yield from (ROOT / name for name in TOP if (ROOT / name).exists())


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_files_hold_one_idea() -> None:
    lengths = {
        relative(p): len(p.read_text().splitlines()) for p in sources() if p.suffix == ".py"
    }
    over = {name: lines for name, lines in lengths.items() if lines > 400 and name not in LONG}
    assert not over


def test_no_path_of_one_machine() -> None:
    machine = re.compile(r"(?<![.\w])/(work|farm|root|home/\w+|Users/\w+)/\w")
    found = [
        f"{relative(path)}:{number}: {line.strip()}"
        for path in sources()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if machine.search(line)
    ]
    assert not found


@pytest.mark.parametrize("name", ["pyproject.toml", "Makefile", "constraints.txt", ".ci/run"])
def test_installing_names_no_host(name: str) -> None:
    assert "://" not in (ROOT / name).read_text()


def private_uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every underscored part of torch that is imported or reached into."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            parts = []
            inner: ast.expr = node
            while isinstance(inner, ast.Attribute):
                parts.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name):
                names = [".".join([inner.id, *reversed(parts)])]
        for name in names:
            private = re.match(r"torch(\.\w+)*?\._[a-zA-Z]", name)
            if private and not name.startswith(WIDELY_USED):
                yield node.lineno, name


def test_private_torch_is_in_the_compat_files() -> None:
    found = [
        f"{relative(path)}:{line}: {name}"
        for folder in ("autoshard", "passes", "runtime", "examples", "benchmarks")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if relative(path) not in COMPAT
        for line, name in private_uses(ast.parse(path.read_text()))
    ]
    assert not found


def test_the_private_check_sees_imports_and_attributes() -> None:
    text = (
        "import torch._dynamo\n"
        "from torch.distributed.tensor._api import x\n"
        "from torch.utils import _pytree\n"
        "torch._C._set_grad_enabled(True)\n"
        "torch.ops._c10d_functional.wait_tensor(x)\n"
    )
    assert {line for line, _ in private_uses(ast.parse(text))} == {1, 2, 4}
