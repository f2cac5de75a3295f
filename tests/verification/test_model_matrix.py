"""The matrix of architectures: what it says of a right step and of a wrong one."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import model_matrix
import pytest
import tiny_models
import tiny_search
import torch
from torch import nn

from autoshard.errors import CollectiveError
from autoshard.verification import program_check
from exhaustive import seed


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tp", "pp"])
def test_a_model_with_functions_of_its_own(gloo2: Any, mesh: str) -> None:
    """BLOOM's GeLU is a `torch.autograd.Function`, for which no table has a rule."""
    assert model_matrix.row(gloo2, "transformers:bloom", mesh) == ("equal", "")


def test_a_drawn_row_is_equal_still(gloo2: Any) -> None:
    known = model_matrix.read(Path(model_matrix.__file__).with_suffix(".jsonl"))
    rows = [one for one in known if one["said"] == "equal" and one["mesh"] != "pp"]
    asked = [(one["model"], one["mesh"]) for one in rows if one["model"].startswith("transformers")]
    asked.sort()
    random.Random(seed() or "0").shuffle(asked)
    for name, mesh in asked:  # the first whose libraries are there: DETR asks for timm
        said, why = model_matrix.by_threads(name, mesh) or model_matrix.row(gloo2, name, mesh)
        if "ImportError" not in why:
            break
    assert (said, why) == ("equal", ""), (name, mesh)


class _Sound(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(2, 2, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return nn.functional.scaled_dot_product_attention(y, y, y)


def test_a_tiny_model_of_little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """An input of 1,024 places is a quarter of that, where a forward may do less."""
    draft = tiny_search.Draft({}, {}, lambda values: _Sound())
    for most, length in ((10**6, 1024), (10**5, 256)):
        monkeypatch.setattr(tiny_search, "WORK", most)
        assert tiny_search.search(draft)[1]["x"].shape == (4, 2, length)
    monkeypatch.setattr(tiny_search, "WORK", 10)
    with pytest.raises(ValueError, match="a forward of more than 10 floating-point operations"):
        tiny_search.search(draft)


def test_a_tiny_model_of_few_named_layers() -> None:
    """What is restored because a shorter list does not do is cut, with the numbers beside it."""

    def make(values: dict[str, Any]) -> nn.Module:
        kinds, depth = values.get("kinds", ["a"]), values.get("depth", 1)
        if kinds.count("b") < 2 or depth != len(kinds):
            raise ValueError("too few kinds" if len(kinds) < 6 else "depth is not that of kinds")
        return nn.Sequential(*(nn.Linear(2, 2) for _ in kinds))

    published = {"kinds": ["a", "a", "b"] * 20, "depth": 60}
    draft = tiny_search.Draft(published, {"kinds": ["a"], "depth": 1}, make)
    values, _ = tiny_search.search(draft)
    assert values == {"kinds": ["a", "a", "b", "a", "a", "b"], "depth": 6}


class _Drawing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * torch.rand(())


def test_what_plain_torch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    made = _Drawing(2, 2), {"x": torch.ones(4, 2)}
    monkeypatch.setattr(tiny_models, "build", lambda name: made)

    def broken(*args: Any, **options: Any) -> Any:
        raise RuntimeError("a view")

    monkeypatch.setattr(model_matrix, "apart", broken)
    assert model_matrix.step_of("", "tp") == ("wrong", "RuntimeError: a view")
    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", broken)
        assert model_matrix.step_of("", "tp") == ("torch", "RuntimeError: a view")
    monkeypatch.setattr(model_matrix, "apart", lambda *args: (1.0, "weight"))
    assert model_matrix.step_of("", "tp")[0] == "random"


class _Branching(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum() > 0 else x * self.bias


@pytest.mark.parametrize("second, said", [(1.0, "wrong"), (-1.0, "refused")])
def test_ranks_that_run_other_graphs_by_their_batch(
    monkeypatch: pytest.MonkeyPatch, second: float, said: str
) -> None:
    x = torch.cat([torch.ones(2, 2), torch.full((2, 2), second)])
    monkeypatch.setattr(tiny_models, "build", lambda name: (_Branching(2, 2), {"x": x}))

    def broken(*args: Any) -> Any:
        raise CollectiveError("the ranks disagree")

    monkeypatch.setattr(model_matrix, "apart", broken)
    assert model_matrix.step_of("", "dp_shard")[0] == said
    assert model_matrix.step_of("", "tp")[0] == "wrong"  # which gives all ranks the same


def test_a_wrong_gradient_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = tiny_models.build("transformers:llama")
    monkeypatch.setattr(tiny_models, "build", lambda name: (model, batch))
    for off, said in ((0.0, "equal"), (1e-5, "equal"), (1e-3, "wrong"), (float("inf"), "wrong")):
        monkeypatch.setattr(model_matrix, "apart", lambda *args, off=off: (off, "weight"))
        assert model_matrix.step_of("", "tp")[0] == said
    assert model_matrix.step_of("", "ep") == ("", "")
    assert model_matrix.by_threads("", "tp") == ("equal", "")
    assert model_matrix.by_threads("", "ep") == ("", "")
    assert model_matrix.by_threads("", "pp") is None  # for processes to say
    split = program_check.split
    monkeypatch.setattr(program_check, "split", lambda x, *at: split(x * 1.01, *at))
    assert model_matrix.by_threads("", "tp") is None  # processes say how far
    assert "| transformers | tp=2 | 1 | 0 | 1 | 0 | 0 | 0 |" in model_matrix.table(
        [
            {"model": "transformers:a", "mesh": "tp", "said": "equal", "why": ""},
            {"model": "transformers:b", "mesh": "tp", "said": "wrong", "why": "weight is 3 off"},
        ],
        2,
    )
