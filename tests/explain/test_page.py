"""The HTML page: well-formed, of one file, and what a browser shows is what the program is."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoshard
from autoshard.explain.facts import Facts
from autoshard.explain.pages import page
from autoshard.program import Program

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(F.gelu(self.up(self.norm(x))))  # a line with </script>
        return y


class Stack(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.layers = nn.Sequential(*(Block() for _ in range(layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(self.first(x))
        return y.square().mean()


def stack(layers: int, **mesh: int) -> Program:
    torch.compiler.reset()
    return autoshard.trace(Stack(layers), (torch.ones(4, 8, 32),), mesh=mesh or {"tp": 2})


@pytest.fixture(scope="module")
def program() -> Program:
    return stack(3)


@pytest.fixture(scope="module")
def text(program: Program) -> str:
    return page(program)


class Checker(HTMLParser):
    """Every element is closed by its own end tag; remembers what is referred to, and scripts."""

    VOID = ("meta", "input", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.ids: set[str] = set()
        self.scripts: dict[str, str] = {}
        self.script = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.references += [str(found[key]) for key in ("src", "href") if key in found]
        self.ids.add(found.get("id") or "")
        if tag == "script":
            self.script = found.get("type") or "javascript"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self.script = ""

    def handle_data(self, data: str) -> None:
        if self.script:
            self.scripts[self.script] = self.scripts.get(self.script, "") + data


@pytest.fixture(scope="module")
def parsed(text: str) -> Checker:
    checker = Checker()
    checker.feed(text)
    checker.close()
    return checker


def data_of(parsed: Checker) -> Any:
    return json.loads(parsed.scripts["application/json"])


def test_one_well_formed_file_without_references(text: str, parsed: Checker) -> None:
    assert parsed.open == [] and parsed.references == []
    assert not re.search(r"@import|url\(|fetch\(|https?://(?!www\.w3\.org/2000/svg)", text)
    # every element that the script asks for is there
    asked = set(re.findall(r'\$\("(\w+)"\)', parsed.scripts["javascript"]))
    assert asked and asked <= parsed.ids


def test_data_is_the_programs(program: Program, parsed: Checker) -> None:
    data = data_of(parsed)
    assert sum(p["count"] for p in data["parameters"]) == len(program.parameters)
    assert sum(c["count"] for c in data["collectives"]) == len(program.collectives())
    assert [c["seconds"] for c in data["collectives"]] == [c.seconds for c in Facts(program).costs]
    assert "</script>" in data["collectives"][0]["code"]  # told, and not the end of the element
    assert data["nodes"] == len(program.memory_timeline())
    names = [p["name"] for p in data["parameters"]]
    assert "layers.0-2.up.weight" in names
    (why,) = [p["because"] for p in data["parameters"] if p["name"] == "layers.0-2.up.weight"]
    assert why == "linear runs on the shard"


def test_graph_folds_layers_and_has_the_collectives_on_edges(parsed: Checker) -> None:
    graph = data_of(parsed)["graph"]
    vertices = graph["vertices"]
    names = [(v["name"], v["operator"], v["count"]) for v in vertices]
    assert ("layers.0-2.up", "linear", 3) in names and ("layers.0-2.down", "linear", 3) in names
    (down,) = [i for i, v in enumerate(vertices) if v["name"].endswith("down")]
    assert vertices[down]["state"] == "P"
    (leaving,) = [e for e in graph["edges"] if e["from"] == down]
    assert leaving["changes"] == ["P -> I"] and leaving["count"] == 3
    assert [(c["op"], c["phase"], c["count"]) for c in leaving["collectives"]] == [
        ("all_reduce", "forward", 3)
    ]
    # the stream between layers comes from the last operator of the one before
    assert any(e["from"] >= e["to"] for e in graph["edges"])


def test_what_is_returned_is_the_last_vertex() -> None:
    made = autoshard.trace(Block(), (torch.ones(4, 8, 32),), mesh={"tp": 2})
    graph = json.loads(_data(page(made)))["graph"]
    *_, (last, edge) = [(graph["vertices"][e["to"]]["name"], e) for e in graph["edges"]]
    assert last == "output" and edge["changes"] == ["P -> I"]
    assert [c["op"] for c in edge["collectives"]] == ["all_reduce"]


def test_a_layer_that_is_planned_otherwise_stands_by_itself() -> None:
    model = Stack(3)
    model.layers[2].up, model.layers[2].down = nn.Linear(32, 1), nn.Linear(1, 32)
    made = autoshard.trace(model, (torch.ones(4, 8, 32),), mesh={"tp": 2})
    layers = [v["layer"] for v in json.loads(_data(page(made)))["graph"]["vertices"]]
    assert list(dict.fromkeys(layers)) == ["", "layers.0-1", "layers.2"]


def test_more_layers_are_no_larger_page(text: str) -> None:
    assert len(page(stack(6))) < 1.5 * len(text)


def test_timeline_is_the_programs(program: Program, parsed: Checker) -> None:
    data, moments = data_of(parsed), program.memory_timeline()
    assert max(nbytes for _, _, nbytes in data["timeline"]) == program.memory().peak
    assert moments[data["forward"] - 1].phase == "forward" != moments[data["forward"]].phase


def test_one_rank(tmp_path: Path) -> None:
    stack(1, tp=1).explain_html(tmp_path / "page.html")
    data = json.loads(_data((tmp_path / "page.html").read_text()))
    assert data["collectives"] == data["alternatives"] == []


def _data(text: str) -> str:
    found = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.skipif(shutil.which("node") is None, reason="node checks the script's syntax")
def test_script_parses(parsed: Checker, tmp_path: Path) -> None:
    script = tmp_path / "page.js"
    script.write_text(parsed.scripts["javascript"])
    done = subprocess.run(["node", "--check", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(BROWSER is None, reason="no browser here")
def test_a_browser_shows_it(text: str, parsed: Checker, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(text, encoding="utf-8")
    shown = browse(path, tmp_path, "--dump-dom")
    assert "CONSOLE" not in shown.stderr, shown.stderr
    data = data_of(parsed)
    dom = shown.stdout
    assert dom.count('class="box"') == len(data["graph"]["vertices"])
    for table in ("collectives", "parameters", "alternatives"):
        found = re.search(rf'<table id="{table}">(.*?)</table>', dom, re.DOTALL)
        assert found is not None and found[1].count("<tr") == len(data[table]) + 1
    assert "The dearest collective: all_reduce" in dom
    picture = tmp_path / "page.png"
    browse(path, tmp_path, f"--screenshot={picture}", "--window-size=1200,2000")
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000


@pytest.mark.skipif(BROWSER is None, reason="no browser here")
def test_an_error_in_the_script_is_seen(text: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.html"
    path.write_text(text.replace("draw();\n</script>", "draw(); nothing();\n</script>"))
    assert "CONSOLE" in browse(path, tmp_path, "--dump-dom").stderr


def browse(path: Path, home: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        str(BROWSER),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        f"--user-data-dir={home / 'profile'}",
        *options,
        path.as_uri(),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
