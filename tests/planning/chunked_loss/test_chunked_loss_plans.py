"""Losses by chunks in plans: when "auto" takes them; their memory, traffic and time."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoshard.building import one_rank
from autoshard.mesh_search.search import search_meshes
from autoshard.planning.chunked_loss import LARGE
from autoshard.planning.cost import cluster, tensor_bytes
from autoshard.planning.estimate import Layout, Training, footprint, held, profile
from autoshard.planning.estimate.memory import Saving
from autoshard.planning.estimate.traffic import tp_collectives
from autoshard.program import Program
from autoshard.runtime.graph_meta import CHUNKED
from autoshard.verification.program_check import verify_program
from traced import builder, programs

ROWS, WIDTH = 1024, 32
GIB = 1 << 30


class Head(nn.Module):
    """The loss of a head on embedded tokens. kind: what else becomes of its logits."""

    def __init__(self, words: int, width: int = WIDTH, kind: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)

    def forward(self, ids: torch.Tensor) -> Any:
        logits = self.head(torch.tanh(self.embed(ids)))
        if self.kind == "softcap":
            logits = 30.0 * torch.tanh(logits / 30.0)
        scores = logits.float().reshape(-1, logits.shape[-1])
        loss = F.cross_entropy(scores, ids.reshape(-1))
        return (loss, logits) if self.kind == "returned" else loss


def on_meta(words: int, width: int, rows: int, kind: str = "", dtype: Any = torch.bfloat16) -> Any:
    torch.compiler.reset()
    with torch.device("meta"):
        ids = torch.zeros(1, rows, dtype=torch.long)
        return builder(Head(words, width, kind).to(dtype), (ids,))


def told(program: Program) -> list[str]:
    """Why each loss that the plan speaks of is whole; "": by chunks."""
    return [one.reason for one in program.graph_module.meta.get(CHUNKED, ())]


@pytest.mark.parametrize("kind", ["", "softcap"])
@pytest.mark.parametrize("n", [1, 2])
def test_the_estimate_is_near_the_program(n: int, kind: str) -> None:
    """What is kept within 2% of AOTAutograd's, the peak within 12% of what operators hold, and
    what travels to the byte; half of what whole logits need at most."""
    asked = [{"mesh": {"tp": n}, "memory": {"chunk_loss": how}} for how in (True, False)]
    found, _ = programs(Head(1000, kind=kind), (torch.randint(0, 1000, (2, ROWS // 2)),), asked)
    chunked = found[0]
    graph = (chunked.serial, chunked.decisions)
    real = sum(tensor_bytes(node.meta["val"]) for node in chunked.joint.saved)
    assert Saving(*graph, n).run().saved == pytest.approx(real, rel=0.02)
    eager = Training(compiled=False)
    peak, before = (
        footprint(held(one.serial, one.decisions, one.parameters, n, eager), Layout(), eager).total
        for one in found
    )
    assert peak == pytest.approx(chunked.memory(inner="aot_eager").peak, rel=0.12)
    assert 2 * peak < before
    ours: Counter[tuple[str, bool]] = Counter()
    theirs: Counter[tuple[str, bool]] = Counter()
    for one in tp_collectives(*graph, n):
        ours[one.op, one.backward] += one.nbytes
    for made in chunked.collectives():
        theirs[made.op, made.phase == "backward"] += made.bytes
    for key in ours | theirs:
        assert ours[key] == pytest.approx(theirs[key], abs=16), key


def test_seconds_are_those_of_the_products_and_of_more_passes() -> None:
    """As much arithmetic as with whole logits; scores go through memory more often."""
    made = on_meta(32_000, 4096, 8192)
    chunked, whole = (
        made({"tp": 1}, hardware_name="h100", memory={"chunk_loss": how}) for how in (True, False)
    )
    ours, theirs = (
        profile(one.serial, one.decisions, one.parameters, 1, cluster("h100"))
        for one in (chunked, whole)
    )
    assert ours.flops == theirs.flops
    assert sum(ours.backward) < sum(theirs.backward) / 3, "its gradients are made in forward"
    assert theirs.compute < ours.compute < 1.5 * theirs.compute


def test_auto_without_a_budget_takes_what_spares_a_gigabyte() -> None:
    """Logits of 2.1 and 0.5 GB, kept and as a gradient; of a wide head much goes to its sums."""
    large = on_meta(65_536, 64, 8192, dtype=torch.float32)({"tp": 1})
    assert told(large) == [""]
    (plan,) = large.decisions.losses.values()
    assert plan.balance is not None and plan.nbytes == 65_536 * 8192 * 4
    assert plan.balance.spared == 2 * plan.nbytes and plan.balance.gain > GIB
    assert "spared" in large.explain(200)
    small = on_meta(16_384, 64, 8192, dtype=torch.float32)({"tp": 1})
    assert told(small) == [] and "logits a rank" not in small.explain(200)
    (wide,) = told(on_meta(131_072, 4096, 2048)({"tp": 1}))  # 2 x 2.1 GB beside 1.6 GB of logits
    assert wide == f"by chunks it would spare nothing, less than {LARGE.least:,}"
    returned = on_meta(65_536, 64, 8192, "returned", torch.float32)({"tp": 1})
    assert told(returned) == [
        "the model returns its logits, which chunk_loss=True withholds in training"
    ]


def test_what_a_rank_has_counts() -> None:
    """Of logits that two ranks split each has half: a gigabyte that is not spared any more."""
    made = on_meta(32_768, 64, 8192, dtype=torch.float32)
    one, two = (made({"tp": n}) for n in (1, 2))
    assert told(one) == [""] and told(two) == []
    assert told(made({"tp": 2}, memory={"chunk_loss": True})) == [""]


def test_auto_with_a_budget_takes_what_the_step_needs() -> None:
    """Whole as long as that fits; then by chunks, before anything is computed again."""
    model, ids = Head(1000), torch.randint(0, 1000, (2, ROWS // 2))
    made = builder(model, (ids,))
    whole, chunked = (
        made({"tp": 1}, memory={"chunk_loss": how}).memory().peak for how in (False, True)
    )
    fits = made({"tp": 1}, memory={"budget": 2 * whole})
    assert told(fits) == []
    torch.compiler.reset()
    budget = (whole + chunked) // 2
    (tight,), values = programs(model, (ids,), [{"mesh": {"tp": 1}, "memory": {"budget": budget}}])
    assert verify_program(tight, values).worst_by_norm[1] < 1e-5
    assert told(tight) == [""] and tight.decisions.recomputation is None
    assert tight.memory().peak == chunked
    large = on_meta(65_536, 64, 8192, dtype=torch.float32)
    assert told(large({"tp": 1}, memory={"budget": 100 * GIB})) == [
        "a step fits its memory with whole logits"
    ]


def test_meshes_are_priced_with_it() -> None:
    """Whole where that fits; by chunks where it does not, or always; never on stages."""
    with torch.device("meta"):
        model, ids = Head(65_536, 64), torch.zeros(1, 8192, dtype=torch.long)

    def row(**options: Any) -> Any:
        torch.compiler.reset()
        asked: Any = {"world": 2, "hardware": "h100", "mesh": {"tp": 2}, **options}
        return search_meshes(model, (ids,), **asked).rows[0]

    whole, auto, always = row(memory={"chunk_loss": False}), row(), row(memory={"chunk_loss": True})
    assert whole.memory == auto.memory and not auto.chunked_losses
    assert always.chunked_losses == 1 and always.memory.total < whole.memory.total / 4
    budget = (always.memory.total + whole.memory.total) // 2
    tight = row(memory={"budget": budget})
    assert tight.chunked_losses == 1 and tight.fits and tight.recomputation is None
    assert tight.memory == always.memory and tight.timing == always.timing


def test_data_parallel_ranks_keep_the_first_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose next batch is longer gathers a weight as often as the others."""
    of_model: dict[str, Any] = {}
    monkeypatch.setattr(one_rank, "remembered_by", lambda *_: of_model)
    first, longer = (
        on_meta(65_536, 64, rows, dtype=torch.float32)({"dp_shard": 2}) for rows in (1024, 8192)
    )
    assert told(first) == told(longer) == []
    of_model.clear()
    assert told(on_meta(65_536, 64, 8192, dtype=torch.float32)({"dp_shard": 2})) == [""]
    assert told(on_meta(65_536, 64, 2048, dtype=torch.float32)({"dp_shard": 2})) == [""]
