"""House rules that a reader would otherwise have to remember."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
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


def sources() -> Iterator[Path]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".md", ".txt") and "__pycache__" not in path.parts:
                yield path
    yield from (ROOT / name for name in TOP if (ROOT / name).exists())


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_files_hold_one_idea() -> None:
    lengths = {relative(p): len(p.read_text().splitlines()) for p in sources() if p.suffix == ".py"}
    over = {name: lines for name, lines in lengths.items() if lines > 400 and name not in LONG}
    assert not over


def test_files_of_tests_have_names_of_their_own() -> None:
    """pytest imports a file by its bare name: a second one of that name ends the whole run."""
    count = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert not {name: n for name, n in count.items() if n > 1}


def types_named_twice(root: Path) -> list[str]:
    """Classes and type aliases of the package that share their name, each with its files."""
    homes: dict[str, list[str]] = {}
    for folder in ("autoshard", "passes", "runtime"):
        for path in sorted((root / folder).rglob("*.py")):
            for node in ast.parse(path.read_text()).body:
                match node:
                    case ast.ClassDef(name=name) | ast.Assign(targets=[ast.Name(id=name)]):
                        if re.match(r"_?[A-Z]\w*[a-z]", name):  # no constant: those are capitals
                            homes.setdefault(name, []).append(path.relative_to(root).as_posix())
    return [f"{name}: {', '.join(files)}" for name, files in homes.items() if len(files) > 1]


def test_a_type_has_a_name_of_its_own(tmp_path: Path) -> None:
    assert not types_named_twice(ROOT)
    for folder, text in [("autoshard", "class Mesh: ...\nRANK = 0"), ("runtime", "RANK = 1")]:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "low.py").write_text(text + "\nSize = int | str\n")
    (tmp_path / "runtime" / "mesh.py").write_text("Mesh = dict[str, int]\n")
    assert types_named_twice(tmp_path) == [
        "Mesh: autoshard/low.py, runtime/mesh.py",
        "Size: autoshard/low.py, runtime/low.py",
    ]


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


#: Private names that are open to every file, and why.
OPEN = {
    "_asdict": "NamedTuple: underscored so that it is no field",
    "_buffers": "nn.Module: the registry that its documentation of state dicts speaks of",
    "_c10d_functional": "torch.ops: a namespace of operators that graphs consist of",
    "_current_frames": "sys: documented",
    "_exit": "os: documented",
    "_flat_weight_refs": "nn.RNNBase, of which a module with stored weights is a subclass",
    "_flat_weights": "nn.RNNBase",
    "_flat_weights_names": "nn.RNNBase",
    "_modules": "nn.Module: a registry",
    "_non_persistent_buffers_set": "nn.Module: a registry",
    "_opname": "OpOverload: its printed name",
    "_orig_mod": "OptimizedModule: documented with torch.compile",
    "_ops": "torch: where the class of torch.ops.aten.add.Tensor lies",
    "_overloadname": "OpOverload: its name",
    "_parameters": "nn.Module: a registry",
    "_pytree": "torch.utils: documented for custom containers",
    "_replace": "NamedTuple",
    "_save_optimizer_and_scheduler": "transformers.Trainer: what a subclass overrides",
    "_schema": "OpOverload: what torch.library's documentation of operators shows",
}
COMPAT = ROOT / "runtime/compat"
#: Fields that symbolic sizes keep their expressions and values in.
SYMBOLIC = ("expr", "hint", "has_hint")


def package_files() -> list[Path]:
    folders = ("autoshard", "passes", "runtime", "examples")
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def is_private(name: str) -> bool:
    return re.match(r"_[a-zA-Z]", name) is not None


@functools.cache
def own_names() -> set[str]:
    """Every name that a file of the package defines: functions, classes, variables, fields."""
    names = set()
    for path in package_files():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id == "self":
                    names.add(node.attr)
    return names


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an expression; what is no name is empty: `.c` of `f().c`."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id if isinstance(node, ast.Name) else "", *reversed(parts)])


def private_uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every underscored module, attribute and name that is not an operator.

    Whatever the object: `x._spec`, `getattr(x, "_spec")`, `from torch._guards import Guard`.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if any(map(is_private, alias.name.split("."))):
                    yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if any(map(is_private, name.split("."))):
                    yield node.lineno, name
        elif isinstance(node, ast.Attribute):
            name = dotted(node)
            if is_private(node.attr) and not re.match(r"(_?aten|torch\.ops|ops|c10d)\.", name):
                yield node.lineno, name
            elif node.attr in SYMBOLIC and dotted(node.value).endswith(".node"):
                yield node.lineno, name
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("getattr", "setattr", "hasattr") and len(node.args) > 1:
                name = node.args[1]
                if isinstance(name, ast.Constant) and is_private(str(name.value)):
                    yield node.lineno, f"{dotted(node.args[0])}.{name.value}"


def private_parts(name: str) -> set[str]:
    return {part for part in name.split(".") if is_private(part)} or {name}


def test_private_parts_of_others_are_used_in_compat_only() -> None:
    ours = own_names()
    found = [
        f"{relative(path)}:{line}: {name}"
        for path in package_files()
        if COMPAT not in path.parents
        for line, name in private_uses(tree_of(path))
        if not private_parts(name) <= OPEN.keys() | ours
    ]
    assert not found


def test_the_private_check_sees_imports_and_attributes() -> None:
    text = (
        "import torch._dynamo\n"
        "from torch.distributed.tensor._api import x\n"
        "from torch.utils import _pytree\n"
        "torch._C._set_grad_enabled(True)\n"
        "torch.ops._c10d_functional.wait_tensor(x)\n"
        "f(x)[0]._backward_hooks\n"
        "getattr(x, '_spec', None)\n"
        "size.node.expr\n"
        "aten._to_copy(x)\n"
        "from torch._subclasses.fake_tensor import FakeTensorMode\n"
    )
    uses = private_uses(ast.parse(text))
    seen = {line for line, name in uses if private_parts(name) - OPEN.keys()}
    assert seen == {1, 2, 4, 6, 7, 8, 10}


#: Private names in compat that no probe can see, and why.
UNPROBED = {
    "_boxed_call": "an attribute that AOTAutograd looks for",
    "_comm_ptr": "only where torch has NCCL",
    "_dynamo_static_indices": "an attribute that Dynamo looks for",
    "_expr": "SymNode, whose fields exist once it is made",
}


def test_every_private_name_of_torch_is_probed() -> None:
    """What another version of torch lacks is said by name, not by the first line that fails."""
    from autoshard.runtime.compat.version import COMPILERS, PRIVATE, TRANSFERS

    probed = [*PRIVATE, *COMPILERS, *TRANSFERS]
    parts = {part for name in probed for part in name.split(".")}
    known = parts | OPEN.keys() | UNPROBED.keys() | own_names()
    missing = []
    for path in sorted(COMPAT.glob("*.py")):
        if path.name == "transformers.py":
            continue
        optional = {
            node.args[1].value
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.Call) and dotted(node.func) == "getattr" and len(node.args) == 3
            if isinstance(node.args[1], ast.Constant)
        }
        for line, name in private_uses(tree_of(path)):
            whole = name.startswith("torch.") and name.rpartition(".")[2] not in optional
            fine = any(f"{each}.".startswith(f"{name}.") for each in probed)
            if not whole:
                fine = {part for part in name.split(".") if is_private(part)} <= known | optional
            if not fine:
                missing.append(f"{relative(path)}:{line}: {name}")
    assert not missing
