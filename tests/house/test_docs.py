"""What the pages of docs/ say of their examples is what happens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard.compiling.debugging import EQUAL_LAYERS
from autoshard.planning.cost.clusters import cluster
from autoshard.planning.rules import registry
from autoshard.planning.rules.table import RULES

DOC = Path(__file__).parents[2] / "docs" / "sharding_rules.md"
INDEX = DOC.parent / "README.md"
PAGES = sorted(DOC.parent.glob("*.md"))


@torch.library.custom_op("mylib::scale_rows", mutates_args=())
def scale_rows(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return x * s[:, None]


@scale_rows.register_fake
def _(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    x, s = ctx.saved_tensors
    return grad * s[:, None], (grad * x).sum(1)


scale_rows.register_autograd(_backward, setup_context=_save)


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.s = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mylib.scale_rows(x, self.s)
        return y


def test_the_example_offers_what_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_rules", dict(registry._rules))
    line = re.search(r"autoshard\.sharding_rule\(.*\)", DOC.read_text())
    assert line is not None
    exec(line[0], {"autoshard": autoshard})
    x = torch.randn(8, 4, requires_grad=True)
    program = autoshard.trace(Rows(), (x,), mesh={"tp": 2})
    target = torch.ops.mylib.scale_rows.default
    (node,) = [n for n in program.serial.graph.nodes if n.target is target]
    offered, reasons = registry.strategies(node, 2)
    states = {(s.inputs, s.output) for s in offered}
    assert {
        (("S(0)", "S(0)"), "S(0)"),
        (("S(1)", "R"), "S(1)"),
        (("P", "R"), "P"),
        (("R", "P"), "P"),
    } <= states
    assert not reasons


def test_the_quoted_rules_stand_in_the_table() -> None:
    quoted = re.findall(r'^"(aten\.[\w.]+)": "(.*)",$', DOC.read_text(), re.MULTILINE)
    assert len(quoted) == 4
    assert all(RULES[name] == text for name, text in quoted)


def test_the_pass_of_the_page_does_what_its_docstring_shows() -> None:
    page = (DOC.parent / "writing_a_pass.md").read_text()
    definition, use = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {"__name__": __name__}  # a dataclass looks its module up
    exec(definition, names)
    exec(use, names)
    text = autoshard.render(names["program"].serial)
    assert f"print(report)  # {names['report']}" in use
    assert "mul(" not in text and "linear(" in text


def headings(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    found = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in found}


def test_links_between_pages_lead_somewhere() -> None:
    root = DOC.parents[1]
    pages = [*PAGES, root / "README.md", root / "CONTRIBUTING.md"]
    links = [
        (page, page.parent / link if link else page, anchor)
        for page in pages
        for link, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text())
    ]
    assert len(links) > 100
    assert not [(page.name, to) for page, to, _ in links if not to.exists()]
    anchors = [(page, to, anchor) for page, to, anchor in links if anchor]
    assert len(anchors) > 20
    assert not [
        (page.name, to.name, anchor) for page, to, anchor in anchors if anchor not in headings(to)
    ]


def test_the_index_lists_every_page() -> None:
    listed = re.findall(r"^- \[.*?\]\((\w+\.md)\): ", INDEX.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in PAGES if page != INDEX)


MOST_WORDS = 30_000  # of all pages together


def test_pages_stay_short() -> None:
    """A reader finds one thing on one page: a fact stands in one place, others link to it."""
    words = {page.name: len(page.read_text().split()) for page in PAGES}
    assert not {name: n for name, n in words.items() if n > 3_000}
    assert sum(words.values()) <= MOST_WORDS


def test_every_path_of_the_map_exists() -> None:
    page = (DOC.parent / "how_it_works.md").read_text()
    paths = re.findall(r"`((?:autoshard|passes|runtime|tests)/[^`]*)`", page)
    assert len(paths) > 40
    assert not [path for path in paths if not (DOC.parents[1] / path).exists()]


def test_the_page_of_variables_names_every_variable_and_what_may_be_left_out() -> None:
    from autoshard.compiling import debugging
    from autoshard.passes import pipeline

    page = (DOC.parent / "debugging.md").read_text()
    (row,) = re.findall(r"^\| `AUTOSHARD_DISABLE` .*$", page, re.MULTILINE)
    assert re.findall(r"`([a-z]+_\w+)`", row) == [*pipeline.OPTIONAL, EQUAL_LAYERS]
    variables = set(re.findall(r"AUTOSHARD_\w+", Path(debugging.__file__).read_text()))
    assert len(variables) == 6 and variables <= set(re.findall(r"AUTOSHARD_\w+", page))


def block(language: str) -> str:
    found = re.search(
        rf"```{language}\n(.*?)```", (DOC.parent / "planning.md").read_text(), re.DOTALL
    )
    assert found is not None
    return found[1]


def test_the_python_of_planning_md_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(block("python"), {})
    assert capsys.readouterr().out
    assert autoshard.Plan.load("plan.json").mesh


def test_the_cluster_file_is_the_built_in_h100(tmp_path: Path) -> None:
    (tmp_path / "file.yaml").write_text(block("yaml"))
    read, known = cluster(str(tmp_path / "file.yaml")), cluster("h100")
    assert (read.inside, read.between, read.per_node) == (
        known.inside,
        known.between,
        known.per_node,
    )
    assert read.efficiency == known.efficiency
    assert read.device.flops == known.device.flops
    assert read.device.memory_bytes == known.device.memory_bytes
