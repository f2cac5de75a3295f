"""cp and tp in one mesh: cp is planned first, tp on the graph of one of its ranks."""

from __future__ import annotations

import collections
import itertools
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_context_parallel import Attention, model_of, padded, programs
from torch import nn

from autoshard.building import first_axis
from autoshard.errors import PlanError
from autoshard.explain import explain
from autoshard.passes.localize import Localize
from autoshard.passes.pipeline import rank_program
from autoshard.planning.context_parallel import BALANCED, attention_form
from autoshard.planning.cost.model import ring_bytes
from autoshard.planning.decisions import on_rank
from autoshard.planning.operators import ATTENTION, packet
from autoshard.planning.plan import GraphPlan, Plan
from autoshard.program import Program
from autoshard.runtime.collectives.axis import Axis
from autoshard.runtime.collectives.lockstep import run_mesh
from autoshard.runtime.collectives.states import I, S, shard_dim
from autoshard.runtime.mesh import offline_mesh
from autoshard.runtime.operators.attention import attend_by_heads
from autoshard.runtime.randomness.generators import STREAM
from autoshard.verification.program_check import verify_program
from joined_batch import check, train
from models import CASES
from side_by_side import Pair, whole
from traced import builder

BOTH = {"cp": 2, "tp": 2}
_OVER_CP = (attend_by_heads, *BALANCED, *BALANCED.values())


def forms_of(program: Program) -> set[str]:
    """How attention runs over cp."""
    assert program.outer is not None
    found = {attention_form(*one) for one in program.outer.decisions.strategies.items()}
    return found - {""}


def heads_on_tp(program: Program) -> bool:
    """Whether each rank of tp attends with its heads of those that a rank of cp works on."""
    states = [
        strategy.output
        for node, strategy in program.decisions.strategies.items()
        if packet(node) in ATTENTION or node.target in _OVER_CP
    ]
    return bool(states) and set(states) == {S(1)}


def is_serial(name: str, left_padded: bool = False, mesh: dict[str, int] = BOTH) -> Program:
    first, *others = [CASES[name].make_batch(i) for i in range(offline_mesh(mesh, 0).batches)]
    first = padded(first) if left_padded else first
    made, values = programs(model_of(name), [first, *others], [mesh], "cpu")
    outer = made[0].outer
    assert outer is not None and outer.gap(made[0].decisions) == 0
    assert verify_program(made[0], values[0], others=values[1:]).worst[1] < 1e-5
    return made[0]


@pytest.mark.parametrize(("name", "left_padded"), [("llama", True), ("gpt2", False)])
def test_a_model_on_cp_and_tp_is_the_serial_one(name: str, left_padded: bool) -> None:
    program = is_serial(name, left_padded)
    assert forms_of(program) == {"by rows"}
    assert name != "llama" or heads_on_tp(program)
    for node, own in program.data.items():
        if node.meta["val"].dim() > 1:  # gathered over cp, of what the rank of tp has
            assert own == {"cp": S(0)}
            assert shard_dim(program.decisions.stored[node]) is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "llama", "mixtral"])
def test_more_models_on_cp_and_tp(name: str) -> None:
    is_serial(name)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["dp_shard", "dp_replicate"])
def test_with_a_data_parallel_axis(axis: str) -> None:
    is_serial("llama", mesh={axis: 2, **BOTH})


@pytest.mark.slow
def test_a_plan_that_only_both_axes_together_find(monkeypatch: pytest.MonkeyPatch) -> None:
    """Latencies over cp, which tp does not divide, decide otherwise than bytes."""
    mesh = {"cp": 4, "tp": 2}
    together = is_serial("gpt2", mesh=mesh).decisions.seconds
    monkeypatch.setattr(first_axis, "plan_both", lambda *_: None)
    batch = CASES["gpt2"].make_batch(0)
    (apart,), _ = programs(model_of("gpt2"), [batch], [mesh], "cpu")
    assert apart.decisions.seconds > 1.005 * together


def sent(program: Program, of: str) -> collections.Counter[str]:
    """Bytes that a rank sends over an axis for activations, by phase."""
    found: collections.Counter[str] = collections.Counter()
    for one in program.collectives():
        if one.axis == of and "S(0)" not in one.change and one.op != "all_reduce":
            found[one.phase] += round(ring_bytes(one.op, one.bytes, program.mesh.axis(of).size))
    return found


@pytest.mark.parametrize(("n", "form"), [(2, "by rows"), (4, "by heads")])
def test_a_layer_sends_what_its_heads_on_tp_need(n: int, form: str) -> None:
    """The formulas of cp alone, of an n-th of the heads, for keys and values below
    n = 1 + heads / shared heads and for exchanged heads above."""
    heads, shared, tp = 16, 8, 2
    with torch.device("meta"):
        model = Attention(heads, shared, 64, causal=False).to(torch.bfloat16)
        x = torch.empty(1, 65536, heads * 64, dtype=torch.bfloat16)
    program = programs(model, [{"x": x}], [{"cp": n, "tp": tp}], "h100")[0][0]
    assert forms_of(program) == {form} and heads_on_tp(program)
    one = 65536 * 64 * 2 / tp  # bytes of one head
    gathered = 2 * one * shared * (n - 1) / n
    exchanged = (2 * heads + 2 * shared) * one / n * (n - 1) / n
    expected = {"by rows": gathered, "by heads": exchanged}[form]
    assert sent(program, "cp") == {"forward": expected, "backward": expected}
    weights = 2 * 2 * (heads + shared) * heads * 64 * 64 // tp  # those of q, k, v and o, in bf16
    gathers = [one for one in program.collectives() if one.change.endswith("S(0) -> R")]
    forward = [one.bytes for one in gathers if one.phase == "forward" and one.axis == "cp"]
    assert sum(forward) == weights, forward


def test_a_plan_file_has_both_axes(tmp_path: Path) -> None:
    """It is followed; one that exchanges heads over cp is the serial model too."""
    model, batch = Attention(8, 4, 8, causal=True), {"x": torch.randn(2, 16, 64)}
    (free,), values = programs(model, [batch], [BOTH], "cpu")
    free.plan.save(tmp_path / "plan.json")
    again = programs(model, [batch], [BOTH], "cpu", plan=tmp_path / "plan.json")[0][0]
    assert again.plan.text() == free.plan.text()
    told = [" ".join(explain(one, compiled=False).split()) for one in (free, again)]
    assert "cp was planned together with it: of all plans of the two there are none" in told[0]
    assert "cp was planned before it" in told[1]

    plan = Plan.load(tmp_path / "plan.json")
    assert plan.outer is not None and (plan.outer.axis, plan.outer.parameters) == ("cp", {})
    (key,) = plan.outer.graphs
    by_heads = "S(2), S(2), S(2) -> S(2) by attend_by_heads"
    nodes = {"scaled_dot_product_attention": by_heads}
    plan.outer.graphs, plan.graphs = {key: GraphPlan(nodes)}, {}
    (exchanged,), values = programs(model, [batch], [BOTH], "cpu", plan=plan)
    assert forms_of(exchanged) == {"by heads"}
    assert verify_program(exchanged, values[0]).worst[1] < 1e-5
    with pytest.raises(PlanError, match="the plan is for cp=2 and tp=2, this mesh has tp=2"):
        programs(model, [batch], [{"tp": 2}], "cpu", plan=plan)


class Classified(nn.Module):
    """A smoothed loss over classes of tokens, some of which are ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(16, 64, bias=False), nn.Linear(64, 128, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.head(F.gelu(self.up(x)))
        return F.cross_entropy(scores, labels, label_smoothing=0.1)


def test_a_loss_whose_tokens_cp_splits_is_split_by_tokens_or_classes_over_tp() -> None:
    labels = torch.randint(0, 128, (32,)).index_fill(0, torch.tensor([1, *range(20, 30)]), -100)
    batch = {"x": torch.randn(32, 16), "labels": labels}
    plan = programs(Classified(), [batch], [BOTH], "cpu")[0][0].plan
    assert plan.outer is not None
    (whole,) = plan.outer.graphs
    plan.outer.graphs = {
        whole: GraphPlan({"cross_entropy_loss": "S(0), S(0) -> P by loss_over_tokens"})
    }
    (key,) = programs(Classified(), [batch], [BOTH], "cpu", plan=replace(plan, graphs={}))[0][
        0
    ].plan.graphs
    for text in (
        "S(0), S(0) -> P by loss_over_tokens",
        "S(1), I -> I by loss_over_tokens_and_classes",
    ):
        plan.graphs = {key: GraphPlan({"cross_entropy_loss": text})}
        made, values = programs(Classified(), [batch], [BOTH], "cpu", plan=plan)
        assert verify_program(made[0], values[0]).worst[1] < 1e-5


class Dropped(nn.Module):
    """Dropout on what tp splits, on what both split, and inside attention."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.dropout(F.gelu(self.up(x)), 0.5)
        h = F.dropout(self.down(h), 0.3) + x
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(h).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2)
        return y.transpose(1, 2).flatten(2)


def test_dropout_is_that_of_the_serial_model() -> None:
    made, values = programs(Dropped(), [{"x": torch.randn(2, 64, 32)}], [BOTH], "cpu")
    assert verify_program(made[0], values[0]).worst[1] < 1e-5
    states = [s for n, s in made[0].decisions.strategies.items() if n.name.startswith("dropout")]
    assert any(one.output != I for one in states)


class Masks(nn.Module):
    """What four dropouts keep."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(F.dropout(torch.ones_like(x) + 0 * x, 0.5) for _ in range(4))


def test_named_states_draw_apart_on_the_axes_that_split_a_value() -> None:
    """Whole on both axes, split on cp, on tp, on both: on an axis alike or apart accordingly."""
    x, options = (
        torch.zeros(2, 8, 64, requires_grad=True),
        {"rng": "tracker", "outputs": "replicate"},
    )
    build = builder(Masks(), (x,))
    plan = build(BOTH, **options).plan
    assert plan.outer is not None
    splits = [("", ""), ("S(1)", ""), ("", "S(2)"), ("S(1)", "S(1)")]
    names = [f"dropout_{i}" for i in range(4, 8)]

    def fixed(states: Sequence[str]) -> GraphPlan:
        given = zip(names, states)
        return GraphPlan({name: f"{s}, I -> {s} by on_shard" for name, s in given if s})

    on_cp, on_tp = zip(*splits)
    plan.outer.graphs = dict.fromkeys(plan.outer.graphs, fixed(on_cp))
    plan = build(BOTH, plan=replace(plan, graphs={}), **options).plan
    plan.graphs = dict.fromkeys(plan.graphs, fixed(on_tp))
    program = build(BOTH, plan=plan, **options)

    def graph(axes: tuple[Axis, ...]) -> Any:
        found = rank_program(program.serial, [Localize(program.decisions)], axes[-1])[0]
        on_rank(found, axes[0])
        return found

    torch.manual_seed(3)
    ranks = run_mesh(BOTH, lambda axes, run: run(x), prepare=graph)
    int64 = torch.iinfo(torch.int64)
    for call, (name, cp_state, tp_state) in enumerate(zip(names, on_cp, on_tp)):
        (node,) = [n for n in program.serial.graph.nodes if n.name == name]
        assert program.decisions.state(node) == (tp_state or I)
        apart = 2 if cp_state else 1, 2 if tp_state else 1
        own = x.detach()
        for state, parts in zip((cp_state, tp_state), apart):
            own = own.chunk(parts, shard_dim(state))[0] if state else own
        rows = []
        for cp, tp in itertools.product(*map(range, apart)):
            source = torch.Generator().manual_seed(3 + (2718 + tp if tp_state else 0))
            seed = torch.randint(int64.min, int64.max, (), generator=source)
            seed = seed ^ (STREAM - 2**64) if cp else seed
            rows.append(torch.ops.autoshard.dropout(torch.ones_like(own), seed, 0.5, call))
        assert len({str(row.tolist()) for row in rows}) == len(rows)
        dim = shard_dim(tp_state or S(0))
        assert dim is not None
        joined = [torch.cat(rows[i : i + apart[1]], dim) for i in range(0, len(rows), apart[1])]
        want = torch.cat(joined, 1)
        assert all(torch.equal(masks[call], want) for masks in ranks), name


class Tiny(nn.Module):
    """A causal language model of one layer; returns its loss and its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.tokens(ids)
        q, k, v = (
            t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits = self.head(x + self.out(y.transpose(1, 2).flatten(2)))
        return F.cross_entropy(logits[0], ids[0].roll(-1)), logits


def train_tiny() -> dict[str, Any]:
    """Two steps beside the serial model, the logits, and what is said of another batch."""
    torch.manual_seed(0)
    pair = Pair(Tiny(), mesh=BOTH)
    batches = torch.randint(0, 64, (2, 1, 32))
    pair.train([lambda m, ids=ids: m(ids)[0] for ids in batches])
    pair.forward(lambda m: m(batches[0])[1])
    norm = nn.utils.clip_grad_norm_  # of gradients whose parts lie on both axes
    for one in (pair.compiled, pair.serial):
        one(batches[1])[0].backward()
    norms = [float(whole(norm(m.parameters(), 1e-3))) for m in (pair.model, pair.serial)]
    stored = {str(p.placements) for p in pair.model.parameters()}
    return {**pair.result(), "norms": norms, "stored": stored}


@pytest.mark.slow
def test_training_on_cp_and_tp_is_serial_training(gloo4: Any) -> None:
    for found in gloo4(train_tiny):
        assert found["loss"] < 1e-5 and found["gradient"] < 1e-5, found
        assert found["norms"][0] == pytest.approx(found["norms"][1], rel=1e-5)
        assert "(_StridedShard(dim=0, sf=2), Shard(dim=0))" in found["stored"], found


def other_batches(rank: int) -> str:
    """What is said where one rank has another batch."""
    torch.manual_seed(0)
    pair, ids = Pair(Tiny(), mesh=BOTH), torch.randint(0, 64, (1, 32))
    if int(os.environ["RANK"]) == rank:
        ids = ids + 1
    with pytest.raises(Exception, match="batch") as raised:
        pair.compiled(ids % 64)
    return str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 2])
def test_all_ranks_are_given_one_batch(gloo4: Any, rank: int) -> None:
    assert all("batch" in told for told in gloo4(other_batches, rank))


def train_llama() -> dict[str, Any]:
    return train("llama", BOTH, (2,), {}, wait=True)


@pytest.mark.slow
def test_microbatches_on_cp_and_tp(gloo4: Any) -> None:
    """In `no_sync`, with clipped gradients and momentum."""
    check(gloo4(train_llama), split=4)
