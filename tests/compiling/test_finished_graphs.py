"""Whole graphs after all passes: what each value is noted to be, and what stays out of a bucket."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

import autoshard
from autoshard.passes.lib.bucketing import GATHER_TOGETHER
from models_hf import llama


def test_a_weight_that_is_read_by_index_is_gathered_by_itself() -> None:
    """Inductor cannot compile a lookup in the columns of a flat result."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.norm = nn.Embedding(64, 32), nn.LayerNorm(32)
            self.up = nn.Linear(32, 32)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.up(self.norm(self.words(ids))).square().mean()

    ids = torch.zeros(4, 8, dtype=torch.long)
    program = autoshard.trace(Words(), (ids,), mesh={"dp_shard": 2})
    (started,) = [n for n in program.joint.forward.graph.nodes if n.target is GATHER_TOGETHER]
    sizes = [source.meta["val"].numel() for source in started.args[0]]
    assert sizes == [64 * 32 // 2, (32 + 32 + 32 * 32 + 32) // 2]


class Checked(fx.Interpreter):
    """Runs a graph on fake tensors: every value has the shape that the passes noted."""

    def run_node(self, n: fx.Node) -> Any:
        found = super().run_node(n)
        noted = n.meta.get("val")
        if n.op == "call_function" and isinstance(noted, torch.Tensor):
            assert (found.shape, found.dtype) == (noted.shape, noted.dtype), n.format_node()
        return found


MESHES = [
    {"dp_shard": 2, "tp": 2},
    {"dp_replicate": 2, "tp": 2},
    {"dp_replicate": 2, "dp_shard": 2},
]


@pytest.mark.parametrize("mesh", MESHES)
def test_graphs_hold_what_they_note(mesh: dict[str, int]) -> None:
    """With sequence parallelism: the norms' gradients are reduced over tp in one bucket, and then
    over a data-parallel axis."""
    with torch.device("meta"):
        model = llama(hidden_size=256)()
    ids = torch.zeros(1, 512, dtype=torch.long, device="meta")
    program = autoshard.trace(model, kwargs={"input_ids": ids, "labels": ids}, mesh=mesh)
    if "tp" in mesh:
        reduced = [c for c in program.collectives() if (c.op, c.axis) == ("all_reduce", "tp")]
        assert any("bucket of 5" in c.change for c in reduced)
    for gm in (program.joint.forward, program.joint.backward):
        assert gm is not None
        given = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
        mode = next(one.fake_mode for one in given if isinstance(one, FakeTensor))
        with mode, torch.no_grad():
            Checked(gm).run(*given)
