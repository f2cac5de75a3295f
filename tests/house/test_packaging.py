"""The wheel holds every module on disk under its installed name, and works away from the tree."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"autoshard": "autoshard", "passes": "autoshard/passes", "runtime": "autoshard/runtime"}


def modules_on_disk(root: Path = ROOT) -> dict[str, Path]:
    """Installed path -> file, of every Python file that users get."""
    return {
        f"{installed}/{file.relative_to(root / folder).as_posix()}": file
        for folder, installed in FOLDERS.items()
        for file in (root / folder).rglob("*.py")
    }


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(wheel, the tree it is made of): a copy, as a stale build folder hides missing modules."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for folder in FOLDERS:
        shutil.copytree(
            ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index")
    run(*pip, "--no-build-isolation", "--wheel-dir", str(out), str(tree), cwd=tree)
    (wheel,) = out.glob("*.whl")
    shutil.rmtree(tree / "build", ignore_errors=True)
    return wheel, tree


def test_packages_list_equals_the_folders() -> None:
    settings: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    declared = settings["tool"]["setuptools"]
    expected = {Path(name).parent.as_posix().replace("/", ".") for name in modules_on_disk()}
    assert set(declared["packages"]) == expected
    assert len(declared["packages"]) == len(expected)
    mapped = {name.replace(".", "/"): folder for name, folder in declared["package-dir"].items()}
    assert mapped == {installed: folder for folder, installed in FOLDERS.items()}


def test_wheel_holds_every_module_and_nothing_else(built: tuple[Path, Path]) -> None:
    wheel, tree = built
    sources = modules_on_disk(tree)
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        contents = {name: archive.read(name) for name in names if name.endswith(".py")}
    others = {"autoshard/__init__.pyi", "autoshard/py.typed", "autoshard/explain/page.html"}
    assert names == {*sources, *others}
    assert contents == {name: source.read_bytes() for name, source in sources.items()}


def test_installed_wheel_works_from_another_folder(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    wheel, _ = built
    target, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index")
    run(*pip, "--target", str(target), str(wheel), cwd=elsewhere)

    (installed,) = metadata.distributions(path=[str(target)])
    entry = {(e.group, e.name): e.value for e in installed.entry_points}
    assert entry["torch_dynamo_backends", "autoshard"] == "autoshard.backend:autoshard"

    program = f"""
import sys
sys.path.insert(0, {str(target)!r})
import autoshard, autoshard.passes, autoshard.planning, autoshard.runtime, autoshard.config
for module in (autoshard, autoshard.passes, autoshard.planning, autoshard.runtime):
    assert module.__file__.startswith({str(target)!r}), module.__file__
assert autoshard.__version__ == {installed.version!r}
import importlib.util
print([n for n in ("passes", "runtime", "examples", "tests") if importlib.util.find_spec(n)])
"""
    assert run(sys.executable, "-c", program, cwd=elsewhere).strip() == "[]"


@pytest.mark.parametrize("folder", ["passes", "runtime"])
def test_bare_import_is_refused(folder: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {folder}"], cwd=ROOT, text=True, capture_output=True
    )
    assert done.returncode != 0
    assert f"import this package as 'autoshard.{folder}', not '{folder}'" in done.stderr
