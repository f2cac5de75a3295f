"""split_recurrent changes no value; dropout between layers is then drawn as any other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autoshard.passes.base import Context
from autoshard.passes.split_recurrent import SplitRecurrent
from autoshard.runtime.collectives.axis import Axis
from autoshard.verification.program_check import verify_program
from traced import programs

T = torch.Tensor


class Recurrent(nn.Module):
    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.rnn = getattr(nn, kind)(8, 16, 3, dropout=0.5, **options)

    def forward(self, x: T) -> T:
        out, last = self.rnn(x)
        states = last if isinstance(last, tuple) else (last,)
        return out.sin().sum() + sum(s.cos().sum() for s in states)


KINDS = [
    ("LSTM", {}),
    ("GRU", {"bidirectional": True, "batch_first": True}),
    ("RNN", {"bias": False}),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_dropout_between_recurrent_layers(kind: str, options: dict[str, Any]) -> None:
    """The masks of a mesh are those of one device; without dropout the split changes nothing."""
    model, x = Recurrent(kind, **options), torch.randn(4, 4, 8)
    (program, alone), values = programs(model, (x,), [{"mesh": {"tp": 2}}, {"mesh": {"tp": 1}}])
    for made in (program, alone):
        drops = [n for n in made.serial.graph.nodes if "autoshard.dropout" in str(n.target)]
        assert len(drops) == 2 and len({n.args[-1] for n in drops}) == 2
        assert verify_program(made, values).worst[1] < 1e-5
    for node in drops:
        node.replace_all_uses_with(node.args[0])
    alone.serial.recompile()
    model.rnn.dropout = 0.0
    torch.testing.assert_close(alone.serial(*values)[0], model(x))


def test_projections_stay_whole() -> None:
    model = nn.LSTM(8, 16, 2, dropout=0.5, proj_size=4)
    (program,), _ = programs(model, (torch.randn(4, 4, 8),), [{"mesh": {"tp": 1}}])
    report = SplitRecurrent().run(program.serial, Context(Axis("tp", 1, 0, "")))
    assert report.hits == 0 and "it has projections" in report.skips[0].reason
