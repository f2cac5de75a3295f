"""Dropout on a mesh against the same model on one device: the same masks, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.distributed.tensor import DTensor

import autoshard
from autoshard.passes.base import Context
from autoshard.passes.invariant_random import InvariantRandom
from autoshard.planning.rules.layers import SEED
from autoshard.program import Program
from autoshard.runtime.collectives.axis import Axis
from autoshard.runtime.collectives.lockstep import run_ranks
from autoshard.runtime.graph_meta import PASS
from autoshard.runtime.randomness.draws import ATTENTION, on_shard, shared_seed
from autoshard.verification.program_check import join, split, verify_program
from model_case import LAYERS
from models import CASES
from models_dropout import dropped
from traced import WithLoss, programs

TOLERANCE = 1e-5


def random_nodes(gm: fx.GraphModule) -> list[fx.Node]:
    return [
        n
        for n in gm.graph.nodes
        if n.meta.get("custom", {}).get(PASS) == "invariant_random"
        and n.target not in (SEED, shared_seed)
    ]


def on_shards(program: Program) -> list[fx.Node]:
    return [n for n in program.graph_module.graph.nodes if n.target is on_shard]


@pytest.mark.parametrize("name", ["bert", pytest.param("t5", marks=pytest.mark.slow), "vit"])
def test_models_with_dropout_compute_what_one_device_computes(name: str) -> None:
    case = dropped(name)
    options = [{"mesh": {"tp": 2}}, {"mesh": {"tp": 4}, "planner": {"sequence_parallel": False}}]
    made, values = programs(WithLoss(case), (case.make_batch(0),), options)
    torch.compiler.reset()  # else Dynamo takes the rate, which changes, for a symbol
    plain, _ = programs(WithLoss(CASES[name]), (CASES[name].make_batch(0),), options)
    for program, without in zip(made, plain):
        report = verify_program(program, values)
        assert report.worst[1] < TOLERANCE, (program.axis.size, report.worst)
        drawn = random_nodes(program.serial)
        assert len(drawn) >= 3 * LAYERS and random_nodes(without.serial) == []
        assert any(node.target.overloadpacket is ATTENTION for node in drawn)
        assert len(on_shards(program)) >= LAYERS
        if program.axis.size != 2:
            continue
        # nothing is gathered to be dropped
        ops = [c.op for c in program.collectives() if c.op != "broadcast"]
        assert len(ops) == len(without.collectives())
        assert sum(c.op == "broadcast" for c in program.collectives()) == 1


def test_the_oracle_sees_a_mask_counted_from_the_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    case = dropped("bert")
    (program,), values = programs(WithLoss(case), (case.make_batch(0),), [{"mesh": {"tp": 2}}])
    for node, strategy in program.decisions.strategies.items():
        if getattr(strategy.impl, "function", None) is on_shard:
            wrong = strategy._replace(impl=_Local(node.target))
            monkeypatch.setitem(program.decisions.strategies, node, wrong)
    assert verify_program(program, values).worst[1] > 100 * TOLERANCE


class _Local:
    """The operator on the shard as if it were the whole."""

    def __init__(self, target: Any) -> None:
        self.target, self.__name__ = target, "local"

    def __call__(self, *args: Any, axis: Axis) -> Any:
        return self.target(*args)


def traced(model: nn.Module, *args: Any, tp: int = 2, **config: Any) -> Program:
    return autoshard.trace(model, args, mesh={"tp": tp}, **config)


class Noisy(nn.Module):
    """Every random operator the pass knows, on values that are worth splitting."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.back = nn.Linear(16, 33), nn.Linear(33, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.dropout(torch.relu(self.wide(x)), 0.3)
        h = h + 0.1 * torch.randn_like(h) + torch.rand_like(h)
        h = h * torch.bernoulli(torch.sigmoid(h.detach())) + torch.rand(33)
        h = h * torch.empty_like(h).exponential_() + torch.empty_like(h).uniform_(-1, 1)
        h = h + torch.empty_like(h).normal_(1, 2) + torch.empty_like(h).bernoulli_(0.25)
        h = F.dropout2d(h[None], 0.5)[0]
        weights = F.gumbel_softmax(self.back(h), dim=-1)
        return (weights * torch.randn(16)).sum()


@pytest.mark.parametrize("n", [1, 2, 4])
def test_every_random_operator_draws_as_on_one_device(n: int) -> None:
    model, x = Noisy(), torch.randn(2, 8, 16)
    (program,), values = programs(model, (x,), [{"mesh": {"tp": n}}])
    left = [
        node
        for node in program.serial.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
        and node.target is not SEED
        and torch.Tag.nondeterministic_seeded in node.target.tags
    ]
    assert left == []
    assert len({node.args for node in random_nodes(program.serial)}) >= 11
    report = verify_program(program, values)
    assert report.worst[1] < TOLERANCE, report.worst


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_masks_are_bit_for_bit_those_of_one_device(n: int, dim: int) -> None:
    x = torch.ones(6, 7, 9)

    def rank(axis: Axis) -> torch.Tensor:
        seed = shared_seed(x.device, axis=axis)
        local = split(x, f"S({dim})", n)[axis.rank]
        op = autoshard.runtime.randomness.draws.dropout
        place = {"dim": dim, "extent": x.shape[dim], "axis": axis}
        return on_shard(local, seed, 0.4, 2, op=op.__name__, **place)

    torch.manual_seed(5)
    seed = torch.ops.autoshard.random_seed(x.device)
    whole = torch.ops.autoshard.dropout(x, seed, 0.4, 2)
    torch.manual_seed(5)
    assert torch.equal(join(run_ranks(n, rank), f"S({dim})"), whole)


def test_evaluation_and_p_of_0_draw_nothing() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.never = nn.Linear(8, 8), nn.Dropout(0.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = F.scaled_dot_product_attention(x, x, x, dropout_p=0.0)
            return self.never(F.dropout(self.lin(h), 0.5, self.training))

    model, x = Both(), torch.randn(4, 8, 8)
    assert random_nodes(traced(model.train(), x).serial)
    program = traced(model.eval(), x)
    assert random_nodes(program.serial) == []
    assert not any(node.target is SEED for node in program.serial.graph.nodes)


@pytest.mark.parametrize("rng", ["invariant", "tracker"])
def test_a_rate_that_changes_between_traces(rng: str) -> None:
    """Dynamo makes an input of a float that differs from last time; the graphs are still made."""

    class Rate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.p = nn.Linear(8, 8), 0.1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(self.lin(x), self.p).sum()

    model, x = Rate(), torch.randn(4, 8)
    ops = []
    for p in (0.1, 0.25, 0.5):
        model.p = p
        program = traced(model, x, rng=rng)
        assert any(p in node.args for node in random_nodes(program.serial))
        assert program.joint.backward is not None
        ops.append([c.op for c in program.collectives()])
    assert ops[0] == ops[1] == ops[2]


def test_training_draws_once_a_call_and_evaluation_never() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Dropout(0.3)), torch.randn(2, 8)
    options = {"inner": "eager", "rng": "invariant"}
    compiled = torch.compile(model, backend="autoshard", options=options)
    for training in (True, False, False, True):
        model.train(training)
        expected = torch.Generator()
        expected.set_state(torch.get_rng_state())
        if training:
            limits = torch.iinfo(torch.int64)
            torch.randint(limits.min, limits.max, (), generator=expected)
        compiled(x)
        assert torch.equal(torch.get_rng_state(), expected.get_state())


def test_p_of_1_drops_everything_and_its_gradient() -> None:
    class All(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(self.lin(x), 1.0).sum()

    (program,), values = programs(All(), (torch.randn(4, 8),), [{"mesh": {"tp": 2}}])
    assert random_nodes(program.serial)
    assert program.serial(*values)[0] == 0
    report = verify_program(program, values)
    assert set(report.gradients.values()) == {0.0} and report.outputs == {"output 0": 0.0}


def test_attention_is_that_of_the_math_kernel() -> None:
    """Without a mask to drop by, every form of call: p so small that nothing is dropped."""
    q, k, v = (torch.randn(2, h, s, 8) for h, s in [(4, 6), (2, 5), (2, 5)])
    full = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    boolean = torch.rand(2, 1, 6, 5) > 0.5
    boolean[0, 0, 1] = False  # a row that sees nothing
    seed = torch.tensor(3)
    calls: list[tuple[Any, ...]] = [
        (q, *full, None, False, None, False),
        (q, *full, None, True, 0.3, False),
        (q, *full, boolean, False, None, False),
        (q, *full, torch.randn(6, 5), False, -0.4, False),
        (q, k, v, None, False, None, True),
        (q.bfloat16(), k.bfloat16(), v.bfloat16(), None, True, None, True),
    ]
    for query, key, value, mask, causal, scale, gqa in calls:
        expected = F.scaled_dot_product_attention(
            query, key, value, mask, 0.0, causal, scale=scale, enable_gqa=gqa
        )
        found = torch.ops.autoshard.attention(
            query, key, value, mask, seed, 1e-12, causal, scale, gqa, 0
        )
        tolerance = 1e-2 if query.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_what_has_its_own_generator_stays() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    output = graph.output((x,))
    gm = fx.GraphModule(nn.Module(), graph)
    with gm.graph.inserting_before(output):
        kwargs = {"generator": torch.Generator()}
        node = gm.graph.call_function(torch.ops.aten.bernoulli.p, (x, 0.5), kwargs)
    node.meta["val"] = torch.randn(4)
    report = InvariantRandom().run(gm, Context(Axis("tp", 2, 0, "")))
    assert report.hits == 0
    assert [s.reason for s in report.skips] == ["it has a generator of its own"]


def trained(
    name: str, tp: int, inner: str, steps: int, checkpointing: bool, apart: bool = False
) -> dict[str, Any]:
    """Losses of `steps` SGD steps with dropout, and the parameters after them."""
    import torch.distributed as dist

    case = dropped(name)
    torch.manual_seed(0)
    model = case.make_model()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    options = {"mesh": {"tp": tp}, "inner": inner, "rng": "invariant"}
    compiled = torch.compile(model, backend="autoshard", options=options)
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(7 + (rank if apart else 0))
    losses = []
    for step in range(steps):
        loss = case.loss(compiled, case.make_batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    found = {
        k: (p.full_tensor() if isinstance(p, DTensor) else p).detach().numpy()
        for k, p in model.named_parameters()
    }
    return {"losses": losses, "parameters": found}


def compare(results: list[dict[str, Any]], serial: dict[str, Any]) -> None:
    for result in results:
        torch.testing.assert_close(result["losses"], serial["losses"], rtol=1e-5, atol=0)
        for key, value in serial["parameters"].items():
            torch.testing.assert_close(
                torch.tensor(result["parameters"][key]), torch.tensor(value), rtol=1e-4, atol=1e-5
            )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
@pytest.mark.parametrize(("name", "checkpointing"), [("gpt2", True), ("bert", False)])
def test_three_steps_equal_one_process(gloo2: Any, name: str, checkpointing: bool) -> None:
    """Ranks whose generators start apart train as one process does, recomputation included."""
    serial = trained(name, 1, "aot_eager", 3, False)
    arguments = (name, 2, "aot_eager", 3, checkpointing, True)
    compare(gloo2(trained, *arguments, pool_timeout=600), serial)
