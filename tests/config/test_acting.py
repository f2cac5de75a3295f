"""Each option on each kind of mesh: it acts, is refused by its name, or leaves the program as it
is, as the table of docs/options.md says."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autoshard.building.batch_check import batch_facts
from autoshard.building.one_rank import build_program
from autoshard.building.pipeline.program import build_pipeline
from autoshard.capture import intercept
from autoshard.config import ACTING, Config, nested, option
from autoshard.errors import ConfigError
from autoshard.planning.cost.clusters import cluster
from autoshard.runtime.mesh import offline_mesh

#: A value of each option that is not its default and that asks for something.
OTHER: dict[str, Any] = {
    "zero": 2,
    "defer_reduction": True,
    "sequence_parallel": False,
    "ep_exchange": "weights",
    "inner": "tensorrt",
    "precision": {"matmul": "float8"},
    "gradient_reduction": "sum",
    "memory_budget": 2**40,
    "host_memory": 10**6,
    "optimizer_states": "host",
    "bucket_bytes": 1000,
    "outputs": "replicate",
    "rng": "tracker",
    "fuse_collectives": True,
    "cuda_graphs": True,
    "inductor": {"max_autotune": True},
    "recompute_collectives": "none",
    "recover_masks": False,
    "loss_tokens": "global",
    "log": "steps.jsonl",
    "chunk_loss": True,
    "batches": "always",
    "timeout": 60.0,
    "initial_weights": "trust",
    "compare_every": 16,
    "microbatches": 2,
    "schedule": "gpipe",
    "virtual_stages": 3,
    "strict": True,
}
MESHES: list[dict[str, int]] = [
    *({axis: 2} for axis in ("tp", "cp", "ep", "dp_shard", "dp_replicate", "pp")),
    {"cp": 2, "tp": 2},
    {"dp_shard": 2, "tp": 2},
    {"pp": 2, "tp": 2},
    {"tp": 1},
]
#: What a program of this file's model shows of its options, each on a mesh where it acts.
SHOWN = [
    ("zero", {"dp_shard": 2}),
    ("gradient_reduction", {"dp_replicate": 2}),
    ("loss_tokens", {"dp_shard": 2}),
    ("sequence_parallel", {"tp": 2}),
    ("precision", {"tp": 2}),
    ("recompute_collectives", {"tp": 2}),
    ("rng", {"tp": 1}),
    ("recover_masks", {"tp": 1}),
    ("chunk_loss", {"tp": 1}),
    ("microbatches", {"pp": 2}),
    ("schedule", {"pp": 2}),
]


class Attentive(nn.Module):
    """Dropout, a dense causal mask, a checkpointed block and a mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(self.embed(ids), 0.1)
        x = checkpoint(lambda x: x + self.down(torch.relu(self.up(x))), x, use_reentrant=False)
        mask = torch.ones(16, 16, dtype=torch.bool).tril()
        q = x.view(8, 16, 2, 16).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        out = self.head(mixed.transpose(1, 2).reshape(8, 16, 32))
        return nn.functional.cross_entropy(out.view(-1, 64), ids.view(-1))


@pytest.fixture(scope="module")
def text() -> Callable[..., str]:
    """What makes the text of a rank's program for a mesh and options, of one trace."""
    ids = torch.randint(64, (8, 16), generator=torch.Generator().manual_seed(0))
    graph: Any = intercept(Attentive(), (ids,), None, lambda *found: found)

    def build(mesh: Mapping[str, int], **options: Any) -> str:
        config = Config.from_options(nested({"mesh": mesh, "inner": "aot_eager", **options}))
        offline, machine = offline_mesh(mesh, 0), cluster("cpu")
        lines = []
        if mesh.get("pp", 1) > 1:
            pipeline = build_pipeline(*graph, mesh["pp"], config, machine, offline.axes)
            graphs = [stage.graph for stage in pipeline.plan.stages]
            lines += [*pipeline.lines(), pipeline.picture()]
        else:
            facts = batch_facts(graph[2])
            program = build_program(*graph, offline, config, machine, "single", facts=facts)
            graphs = [program.graph_module]
            lines.append(program.plan.text())
        for one in graphs:
            lines += [f"{n} {n.target} {n.args} {n.kwargs} {n.meta.get('recompute')}"
                      for n in one.graph.nodes]  # fmt: skip
        return "\n".join(lines)

    return build


def refused(name: str, mesh: Mapping[str, int]) -> bool:
    acting = ACTING[name]
    several = max(mesh.values()) > 1
    beside = any(mesh.get(axis, 1) > 1 for axis in acting.refused)
    return beside or (acting.needed and several and "pp" not in mesh)


def test_every_option_has_its_axes_and_another_value() -> None:
    names = {field.name for field in dataclasses.fields(Config)}
    assert names == set(ACTING) == {*OTHER, "mesh", "plan"}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_an_option_that_does_not_act_is_refused_or_changes_nothing(
    text: Callable[..., str], mesh: dict[str, int]
) -> None:
    idle = {}
    for name, value in OTHER.items():
        inner = "inductor" if name in ("cuda_graphs", "inductor") else "aot_eager"
        if refused(name, mesh):
            with pytest.raises(ConfigError, match=re.escape(option(name))):
                text(mesh, **{"inner": inner, name: value})
        elif not ACTING[name].acts(mesh):
            idle[name] = value
    assert text(mesh, **idle) == text(mesh)


@pytest.mark.parametrize(("name", "mesh"), SHOWN)
def test_an_option_acts(text: Callable[..., str], name: str, mesh: dict[str, int]) -> None:
    assert ACTING[name].acts(mesh)
    assert text(mesh, **{name: OTHER[name]}) != text(mesh)


@pytest.mark.parametrize("sizes", [{"pp": 1, "tp": 2}, None])
def test_a_mesh_that_names_pp_or_was_chosen_needs_no_stages(sizes: dict[str, int] | None) -> None:
    Config(mesh=sizes, schedule="zb1", microbatches=4).refuse({"tp": 2})
