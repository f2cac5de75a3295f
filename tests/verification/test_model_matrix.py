"""Architectures that no other test names, drawn by the commit: a training step beside serial."""

from __future__ import annotations

from typing import Any

import pytest

import model_matrix
import tiny_models

PARTS = 200


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_no_architecture_trains_wrongly(gloo2: Any, part: int) -> None:
    """Each of a part's on a mesh; the next part asks other meshes."""
    wrong = []
    for number, name in enumerate(tiny_models.names()[part::PARTS]):
        mesh = model_matrix.MESHES[(part + number) % 4]
        said, why = model_matrix.row(gloo2, name, mesh)
        if said == "wrong":
            wrong.append(f"{name} on {mesh}=2: {why}")
    assert not wrong, "\n".join(wrong)


def test_a_wrong_gradient_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = tiny_models.build("transformers:llama")
    monkeypatch.setattr(tiny_models, "build", lambda name: (model, batch))
    for off, said in ((0.0, "equal"), (1e-5, "equal"), (1e-3, "wrong"), (float("inf"), "wrong")):
        monkeypatch.setattr(model_matrix, "apart", lambda *args, off=off: (off, "weight"))
        assert model_matrix.step_of("", "tp")[0] == said
    assert model_matrix.step_of("", "ep") == ("", "")
    assert "| transformers | tp=2 | 1 | 0 | 1 | 0 |" in model_matrix.table(
        [
            {"model": "transformers:a", "mesh": "tp", "said": "equal", "why": ""},
            {"model": "transformers:b", "mesh": "tp", "said": "wrong", "why": "weight is 3 off"},
        ]
    )
