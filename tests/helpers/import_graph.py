"""The import graph of the package: its modules, who imports whom, its circles, its closed doors."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

#: Folder of the repository -> the package it installs as.
PACKAGES = {
    "autoshard": "autoshard",
    "passes": "autoshard.passes",
    "runtime": "autoshard.runtime",
}

#: Packages whose files and folders are doors of their own.
OPEN = ("autoshard", "autoshard.runtime", "autoshard.passes.lib")

Edges = Mapping[str, Set[str]]


def module_of(name: str) -> str:
    """The module of a file of the repository: runtime/mesh.py is autoshard.runtime.mesh."""
    folder, *parts = Path(name).with_suffix("").parts
    return ".".join((PACKAGES[folder], *(parts[:-1] if parts[-1] == "__init__" else parts)))


def imported_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each import outside of TYPE_CHECKING; `from a import b` gives a.b."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                yield from imported_names(other)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            dots = "." * node.level  # a relative import keeps its dots: nobody may write one
            names = [f"{dots}{node.module or ''}.{alias.name}" for alias in node.names]
            yield from ((node.lineno, name) for name in names)
        else:
            yield from imported_names(node)


def used_names(tree: ast.Module) -> Iterator[str]:
    """Dotted names that a file imports from others, and the attributes it reads of those."""
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                bound[alias.asname or alias.name] = name
                yield name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in bound:
                yield f"{bound[node.value.id]}.{node.attr}"


@dataclass(frozen=True)
class Tree:
    """The Python files of a repository under `root`."""

    root: Path

    @cached_property
    def files(self) -> dict[str, Path]:
        """Module -> file; a package is its `__init__`."""
        found = {}
        for folder, package in PACKAGES.items():
            for file in sorted((self.root / folder).rglob("*.py")):
                parts = file.relative_to(self.root / folder).with_suffix("").parts
                parts = parts[:-1] if parts[-1] == "__init__" else parts
                found[".".join((package, *parts))] = file
        return found

    @cached_property
    def packages(self) -> set[str]:
        """The modules that are folders."""
        return {module for module, file in self.files.items() if file.name == "__init__.py"}

    @cached_property
    def names(self) -> dict[str, list[tuple[int, str]]]:
        """Module -> what it imports."""
        return {
            module: list(imported_names(ast.parse(file.read_text())))
            for module, file in self.files.items()
        }

    @cached_property
    def edges(self) -> Edges:
        """Module -> modules of the package that it imports, lazy imports counted."""
        found: dict[str, set[str]] = {}
        for module, names in self.names.items():
            targets = {self.target(name) for _, name in names} - {None, module}
            found[module] = {target for target in targets if target is not None}
        return found

    def target(self, name: str) -> str | None:
        """The module that the dotted name is, or is in; None for another distribution's."""
        if name in self.files:
            return name
        package = name.rpartition(".")[0]
        return package if package in self.files else None

    def rooms(self, package: str = "autoshard") -> dict[str, set[str]]:
        """File or folder directly in a package -> the other ones of it that it imports."""
        found: dict[str, set[str]] = {}
        inside, depth = f"{package}.", package.count(".") + 1
        for module, targets in self.edges.items():
            if module.startswith(inside):
                room = module.split(".")[depth]
                reached = {t.split(".")[depth] for t in targets if t.startswith(inside)}
                found.setdefault(room, set()).update(reached - {room})
        return found

    def import_lines(self) -> tuple[int, int]:
        """Lines of import statements, and all lines, of the files."""
        found = total = 0
        for file in self.files.values():
            text = file.read_text()
            nodes = ast.walk(ast.parse(text))
            lines = [
                range(node.lineno, (node.end_lineno or node.lineno) + 1)
                for node in nodes
                if isinstance(node, (ast.Import, ast.ImportFrom))
            ]
            found, total = found + sum(map(len, lines)), total + len(text.splitlines())
        return found, total

    def names_given_twice(self) -> dict[str, list[str]]:
        """`room/name` -> the files and folders of that name inside of a room of `autoshard`."""
        found: dict[str, list[str]] = {}
        for module in self.files:
            if module.count(".") > 1:
                room, name = module.split(".")[1], module.rpartition(".")[2]
                found.setdefault(f"{room}/{name}", []).append(module)
        return {name: modules for name, modules in found.items() if len(modules) > 1}

    def deep_imports(self) -> list[str]:
        """Imports of a file in a folder, from outside of the folder and not by its door."""
        found = []
        for module, names in self.names.items():
            for line, name in names:
                target = self.target(name)
                if target is None or target in self.packages:  # a folder is its own door
                    continue
                parts = target.split(".")
                outer = [".".join(parts[:i]) for i in range(1, len(parts))]
                closed = [
                    package
                    for package in outer
                    if package not in OPEN and not f"{module}.".startswith(f"{package}.")
                ]
                if closed:
                    file = self.files[module].relative_to(self.root).as_posix()
                    found.append(f"{file}:{line}: {target} is behind the door {closed[0]}")
        return found

    def unused_doors(self, users: Iterable[Path]) -> list[str]:
        """Names of a folder's `__init__` that nobody outside of the folder imports.

        users: other files that import from the package; texts are searched for import lines.
        """
        doors = {
            f"{package}.{alias.asname or alias.name}"
            for package in self.packages
            for node in ast.parse(self.files[package].read_text()).body
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("autoshard")
            for alias in node.names
            if f"{node.module}.{alias.name}" not in self.files  # imported for what it registers
        }
        found: set[str] = set()
        for module, file in self.files.items():
            inside = f"{module}."
            used = set(used_names(ast.parse(file.read_text())))
            found |= {n for n in used if not inside.startswith(f"{n.rpartition('.')[0]}.")}
        for file in users:
            text = file.read_text()
            if file.suffix == ".md":
                text = "\n".join(re.findall(r"^ *((?:from|import) autoshard[\w., ]*)$", text, re.M))
            found |= set(used_names(ast.parse(text)))
        return sorted(doors - found)

    def shadowed_modules(self) -> list[str]:
        """Modules whose name their folder's `__init__` also gives to something of its own."""
        found = []
        for package in sorted(self.packages):
            tree = ast.parse(self.files[package].read_text())
            bound = {
                alias.asname or alias.name: f"{node.module}.{alias.name}"
                for node in tree.body
                if isinstance(node, ast.ImportFrom)
                for alias in node.names
            }
            for name, source in bound.items():
                module = f"{package}.{name}"
                if module in self.files and source != module:
                    found.append(f"{module} is a file, and {source} under that name")
        return found


def circles(edges: Edges) -> list[list[str]]:
    """The sets of nodes that reach each other, each sorted: Tarjan's strongly connected parts."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(edges.get(node, ())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            start = stack.index(node)
            part = sorted(stack[start:])
            del stack[start:]
            if len(part) > 1:
                found.append(part)

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return found


def height(rooms: Edges) -> int:
    """How many floors rooms without a circle need, each above all that it imports."""
    floors: dict[str, int] = {}

    def floor(room: str) -> int:
        if room not in floors:
            floors[room] = 1 + max(map(floor, rooms[room]), default=0)
        return floors[room]

    return max(map(floor, rooms), default=0)


def arrows_up(rooms: Edges, floors: tuple[tuple[str, ...], ...]) -> list[str]:
    """Imports of a room that do not go to a lower floor."""
    height = {room: floor for floor, names in enumerate(floors) for room in names}
    return [
        f"{room} (floor {height[room] + 1}) imports {other} (floor {height[other] + 1})"
        for room in sorted(rooms)
        for other in sorted(rooms[room])
        if height[room] <= height[other]
    ]


def crowded_folders(folders: list[Path], most: int) -> list[str]:
    """Folders of more than `most` files, `__init__` not counted."""
    found = []
    for folder in folders:
        count = len([file for file in folder.glob("*.py") if file.name != "__init__.py"])
        if count > most:
            found.append(f"{folder} has {count} files")
    return found
