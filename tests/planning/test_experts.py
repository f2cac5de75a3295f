"""How mixtures of experts are split: each way is right and sends what its formula says, and the
cheapest one changes where the formulas cross."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, fx

import autoshard
from autoshard.explain.alternatives import alternatives
from autoshard.planning import Request, fingerprint, plan_graph
from autoshard.planning.estimate.traffic import tp_collectives
from autoshard.planning.expert_columns import inner_split
from autoshard.planning.mixtures import WAYS, is_mixture, row_bytes, way_of
from autoshard.planning.plan import GraphPlan, Plan, strategy_text
from autoshard.planning.strategy import Strategy
from autoshard.program import Program
from autoshard.runtime.operators.expert_body import parse
from autoshard.verification.program_check import verify_program
from gradient_types import check_types
from mixture_families import Loop
from models_plain import Mixture, MixtureLoss
from traced import builder, programs

OWNED, INSIDE, TOKENS, BOTH = WAYS


def mixtures(program: Program) -> list[fx.Node]:
    return [node for node in program.serial.graph.nodes if is_mixture(node)]


def ways(program: Program) -> list[str]:
    return [way_of(program.decisions.strategies[node]) for node in mixtures(program)]


def offered(program: Program) -> list[Strategy]:
    """All ways that the planner may split the program's mixtures."""
    return [one for node in mixtures(program) for one in program.decisions.offered[node]]


def forced(program: Program, way: str) -> Plan:
    """A plan that says of the program's mixtures which way, and nothing else."""
    nodes = {}
    for node in mixtures(program):
        (one,) = [s for s in program.decisions.offered[node] if way_of(s) == way]
        nodes[node.name] = strategy_text(one)
    graphs = {fingerprint(program.serial): GraphPlan(nodes)}
    return Plan("tp", program.axis.size, graphs=graphs)


@pytest.mark.parametrize("form", ["packed", "interleaved"])
@pytest.mark.parametrize("way", WAYS)
def test_each_way_equals_serial_and_sends_what_its_formula_says(way: str, form: str) -> None:
    """T tokens of H numbers, k choices each, E experts of inner size I on n ranks. Whole experts
    and shares of experts send tokens: T*H in and T*H out, each way; packed shares exchange the
    weights 2*E*I*H/n too. Split tokens send the weights, 3*E*I*H each way; those that are not kept
    are gathered once more in backward. Both split send the rows of choices, T*k*H/n each way, in
    forward and in backward, and how many they are."""
    n, t, h, experts, inner, k = 2, 72, 8, 4, 16, 2
    model = MixtureLoss(form, biases=form == "interleaved", experts=experts, inner=inner, k=k)
    x, options = torch.randn(t, h), {"mesh": {"tp": n}, "planner": {"bucket_bytes": 1}}
    (free,), _ = programs(model, (x,), [options])
    torch.compiler.reset()
    (program,), values = programs(model, (x,), [{**options, "plan": forced(free, way)}])
    assert ways(program) == [way]
    if way == BOTH:
        check_types(program)
    differences = verify_program(program, values)
    assert differences.worst_by_norm[1] < 1e-5

    tokens, stacks = 4 * t * h, 4 * 3 * experts * inner * h
    sent: Counter[str] = Counter()
    for one in program.collectives():
        (node,) = mixtures(program)
        inside = one.change.startswith((node.name, *(s.name for s in node.args[3])))
        again = inside and (one.op, one.phase) == ("all_gather", "backward")
        sent["again" if again else "inside" if inside else "outside"] += one.bytes
    if way == TOKENS:
        biases = 4 * experts * (2 * inner + h) if form == "interleaved" else 0
        # gathered, their gradients scattered; the result is gathered where what follows is whole
        assert sent["inside"] - 2 * (stacks + biases) in (0, tokens)
        assert sent["again"] <= stacks + biases
    elif way == INSIDE and form == "packed":
        exchanged = 2 * 4 * 2 * experts * inner * h // n
        assert sent["inside"] - exchanged in (tokens, 2 * tokens)
    elif way == BOTH:
        rows, counts = t * k // n, 8 * experts
        # rows and what they count for there and back, and their gradients; the counts
        assert sent["inside"] - (4 * rows * (4 * h + 2) + counts) in (0, tokens)
        priced = tp_collectives(program.serial, program.decisions, n, 1)
        assert Counter((one.op, one.nbytes) for one in priced) == Counter(
            (one.op, one.bytes) for one in program.collectives()
        )
        text = program.explain(160)
        assert all(f"\n{other}  " in text for other in (OWNED, INSIDE, TOKENS)), text
    else:
        # the sum over ranks: reduced for all, or reduced and split with a gather in backward
        assert sent["inside"] in (tokens, 2 * tokens)


@pytest.mark.parametrize("way", WAYS)
def test_each_way_runs_the_kernels_of_16_bits(way: str) -> None:
    """Their products want rows and matrices aligned, which an exchanged weight must be too."""
    model = MixtureLoss("packed").to(torch.bfloat16)
    x, options = torch.randn(64, 8).to(torch.bfloat16), {"mesh": {"tp": 2}}
    (free,), _ = programs(model, (x,), [options])
    torch.compiler.reset()
    (program,), values = programs(model, (x,), [{**options, "plan": forced(free, way)}])
    assert ways(program) == [way] and program.joint.backward is not None
    differences = verify_program(program, values)
    assert differences.worst_by_norm[1] < 3e-2


WIDE = {"hidden": 2048, "experts": 64, "inner": 256}
CROSSINGS = {
    # fewer experts than ranks cannot be dealt out; as many can, and packed halves need no exchange
    "experts": (
        *({"experts": 2, "k": 1, "inner": 1024}, 512, INSIDE),
        *({"experts": 8, "k": 1, "inner": 1024}, 512, OWNED),
    ),
    # gathering tokens grows with their number, gathering weights does not
    "tokens": ({"inner": 8}, 1 << 20, TOKENS, {"inner": 8}, 1 << 9, OWNED),
    # every rank has a row for each choice, of the whole inner size or of a share of it
    "rows": ({"inner": 1024}, 1 << 12, INSIDE, {"inner": 1024}, 1 << 6, OWNED),
    # k rows of each token travel, or the token to all of n ranks
    "choices": ({**WIDE, "k": 1}, 1 << 12, BOTH, {**WIDE, "k": 32}, 1 << 12, INSIDE),
    # the host waits for the counts however few they are
    "latency": ({**WIDE, "k": 1}, 1 << 12, BOTH, {**WIDE, "k": 1}, 1 << 9, OWNED),
}


@pytest.mark.parametrize("name", CROSSINGS)
def test_the_cheapest_way_changes_where_the_formulas_cross(name: str) -> None:
    for first in (0, 3):
        sizes, tokens, way = CROSSINGS[name][first : first + 3]
        torch.compiler.reset()
        settings = {"hidden": 256, "experts": 8, "inner": 64, **sizes}
        with torch.device("meta"):
            model, x = MixtureLoss("packed", **settings), torch.empty(tokens, settings["hidden"])
            program = autoshard.trace(model, (x,), mesh={"tp": 4}, hardware="h100")
        assert ways(program) == [way], (name, first)


def test_a_layer_of_qwen3_30b_sends_no_more_than_its_tokens_at_once() -> None:
    """k = n = 8: the rows that leave a rank are as many as all tokens, and each is kept by one rank
    only, where experts that are split alone keep them all on each."""
    config = transformers.Qwen3MoeConfig(
        hidden_size=2048,
        moe_intermediate_size=768,
        num_hidden_layers=1,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        vocab_size=4096,
    )
    ids = torch.zeros(1, 4096, dtype=torch.int64, device="meta")
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    program = autoshard.trace(model, (), batch, mesh={"tp": 8}, hardware="h100")
    assert ways(program) == [BOTH]
    tokens = 2 * 4096 * 2048
    assert all(one.bytes <= tokens for one in program.collectives())
    (node,) = mixtures(program)
    kept, widest = row_bytes(node, program.decisions.strategies[node], 8)
    rows = 4096 * 8 // 8
    assert kept == rows * (2 * (2048 + 2 * 768 + 768 + 2048) + 2 + 3 * 8)
    assert widest == rows * 2 * 2048
    found = alternatives(program)
    assert {OWNED, INSIDE, TOKENS} <= {one.name for one in found}
    (mixture,) = program.serial.meta["mixtures"]
    assert mixture.what == "128 experts, 8 a token"


def test_products_one_by_one_say_why_in_the_report() -> None:
    class Scattered(Mixture):
        def routed(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
            chosen, order = torch.sort(ids.reshape(-1))
            counts = torch.histc(chosen.float(), self.experts, 0, self.experts - 1)
            offs = counts.cumsum(0, dtype=torch.int32)
            up = self.product(x[order // self.k], self.up, offs).relu()
            out = self.product(up, self.down.transpose(-2, -1), offs)
            return torch.zeros_like(x).index_add(0, order // self.k, out)

    torch.compiler.reset()
    program = builder(Scattered("one"), (torch.randn(6, 8),))({"tp": 2})
    text = program.explain(200)
    assert "product by product" in text and "index_add.default joins the rows and" in text


def _body(*instructions: str) -> Any:
    return parse(f"[{','.join(instructions)}]")


UP = '["transformers.grouped_mm_fallback.default",["%rows","%s0","%offs"],{}]'
DOWN = '["transformers.grouped_mm_fallback.default",["%{}","%s1","%offs"],{{}}]'


@pytest.mark.parametrize(
    "body,said",
    [
        ((UP, '["aten.relu.default",["%0"],{}]'), "does not sum over"),
        (
            (UP, DOWN.format(0), '["aten.div.Tensor",["%rows","%1"],{}]'),
            "div.Tensor of a sum of shares",
        ),
        (
            (UP, DOWN.format(0), '["aten.relu.default",["%1"],{}]'),
            "relu.default of a sum of shares",
        ),
        (
            (UP, '["aten.mul.Tensor",["%0","%rows"],{}]', DOWN.format(1)),
            "columns of the whole rows",
        ),
        ((UP, '["aten.slice.Tensor",["%0",1,0,4],{}]', DOWN.format(1)), "a slice of the columns"),
        ((UP, '["aten.split.Tensor",["%0",3,-1],{}]', DOWN.format(1)), r"parts of [3, 3] % 2 != 0"),
    ],
)
def test_what_cannot_be_split_inside_says_why(body: tuple[str, ...], said: str) -> None:
    width = 6 if "3,-1" in str(body) else 8
    found = inner_split(_body(*body), [(4, 8, width), (4, width, 8)], 2, 4)
    assert isinstance(found, str) and said in found


def test_an_export_has_no_shapes_that_depend_on_the_router() -> None:
    program = builder(MixtureLoss("packed"), (torch.randn(64, 8),))({"tp": 2})
    request = Request(parameters=program.parameters, even=True)
    exported = plan_graph(program.serial, 2, program.machine, request)
    (node,) = mixtures(program)
    assert {OWNED, TOKENS} <= {way_of(one) for one in exported.offered[node]} < {"", *WAYS}
    assert BOTH in {way_of(one) for one in offered(program)}


def test_experts_in_a_loop_are_split_as_layers_are_and_summed_once() -> None:
    (program,), values = programs(Loop(), (torch.randn(256, 8),), [{"mesh": {"tp": 2}}])
    assert not mixtures(program)
    experts = {k: s for k, s in program.stored().items() if "experts" in k}
    assert len(experts) == 8 and all(state.startswith("S") for state in experts.values())
    tokens = 4 * 256 * 8
    forward = [c for c in program.collectives() if c.phase == "forward" and c.bytes >= tokens]
    assert [one.bytes for one in forward] == [tokens]
    assert verify_program(program, values).worst_by_norm[1] < 1e-5


class Counting(Loop):
    """Experts run on parts of the sorted rows, whose lengths the host reads."""

    def routed(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        order = ids.reshape(-1).argsort()
        sizes = torch.zeros_like(ids).new_zeros(4).index_add(0, ids.reshape(-1), _ones(ids))
        parts = x[order // ids.shape[1]].split(sizes.tolist())
        rows = torch.cat([expert(part) for expert, part in zip(self.experts, parts)])
        rows = rows * weights.reshape(-1)[order].unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, order // ids.shape[1], rows)


def _ones(ids: Tensor) -> Tensor:
    return torch.ones_like(ids.reshape(-1))


def test_lengths_that_the_host_reads_are_planned() -> None:
    (program,), values = programs(Counting(), (torch.randn(64, 8),), [{"mesh": {"tp": 2}}])
    experts = [state for name, state in program.stored().items() if "experts" in name]
    assert all(state.startswith("S") for state in experts)
    assert verify_program(program, values).worst_by_norm[1] < 1e-5


@pytest.mark.parametrize("experts,n", [(8, 4), (5, 3), (2, 4)])
def test_more_ranks_uneven_experts_and_fewer_than_ranks(experts: int, n: int) -> None:
    model = MixtureLoss("packed", experts=experts)
    x, options = torch.randn(64, 8), {"mesh": {"tp": n}}
    (free,), _ = programs(model, (x,), [options])
    way = INSIDE if experts < n else OWNED
    assert (experts < n) == all(way_of(s) != OWNED for s in offered(free))
    torch.compiler.reset()
    (program,), values = programs(model, (x,), [{**options, "plan": forced(free, way)}])
    assert ways(program) == [way]
    assert verify_program(program, values).worst_by_norm[1] < 1e-5


def test_experts_beside_data_parallel_ranks() -> None:
    """Stored as shards of both axes; each data-parallel rank routes its own tokens."""
    x, mesh = torch.randn(64, 8), {"dp_shard": 2, "tp": 2}
    model = MixtureLoss("packed")
    (free,), _ = programs(model, (x,), [{"mesh": mesh}])
    torch.compiler.reset()
    (program,), values = programs(model, (x,), [{"mesh": mesh, "plan": forced(free, OWNED)}])
    assert ways(program) == [OWNED]
    assert any(v is x for v in values)
    others = [torch.randn_like(v) if v is x else v for v in values]
    differences = verify_program(program, values, others=[others])
    assert differences.worst_by_norm[1] < 1e-5
