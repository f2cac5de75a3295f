"""The direction of imports, and which third parties each layer may know."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: Folder -> (what of autoshard it may import, third parties). functorch is a part
#: of the torch distribution; safetensors and transformers are imported where they are used, by
#: those who have the extra.
LAYERS = {
    "runtime": (("autoshard.runtime",), {"torch", "functorch"}),
    "autoshard/planning": (
        ("autoshard.planning", "autoshard.runtime"),
        {"torch", "numpy"},
    ),
    "passes": (
        ("autoshard.passes", "autoshard.planning", "autoshard.runtime"),
        {"torch"},
    ),
    "autoshard/export": (("autoshard",), {"torch", "transformers"}),
    "autoshard/export/trt": (("autoshard",), {"torch"}),
    "autoshard": (("autoshard",), {"torch", "safetensors"}),
}


def imported(file: Path) -> list[str]:
    """Dotted names a file imports, wherever in the file; `from a import b` gives a.b."""
    names = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file.name}:{node.lineno}: write the absolute import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


@pytest.mark.parametrize("folder", LAYERS)
def test_direction(folder: str) -> None:
    packages, third_parties = LAYERS[folder]
    files = sorted((ROOT / folder).glob("*.py"))
    assert files
    wrong = []
    for file in files:
        for name in imported(file):
            root = name.partition(".")[0]
            known = root in sys.stdlib_module_names or root in third_parties
            if not known and not within(name, packages):
                wrong.append(f"{folder}/{file.name} imports {name}")
    assert not wrong
