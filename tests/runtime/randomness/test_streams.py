"""Named random states: seeds, forks, checkpoints; models that draw from them (rng="tracker")."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard import rng
from autoshard.passes.localize import Localize
from autoshard.passes.pipeline import rank_program
from autoshard.program import Program
from autoshard.runtime.collectives.axis import Axis
from autoshard.runtime.collectives.lockstep import run_ranks
from autoshard.runtime.randomness import draws as random_ops
from autoshard.runtime.randomness import generators as streams
from autoshard.runtime.randomness.generators import TRACKER, Tracker
from traced import programs


@pytest.fixture(autouse=True)
def place() -> Iterator[None]:
    yield
    TRACKER.place(0, 0)
    TRACKER.added.clear()
    TRACKER._count = -1


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_seeds_are_those_of_the_rule() -> None:
    torch.manual_seed(1234)
    tracker = Tracker(tp_rank=3)
    tracker.follow()
    assert tracker.seeds == {
        "data-parallel": 1234,
        "tensor-parallel": 1234 + 2718 + 3,
        "expert": 1234 + 1024 + 300,
    }


def test_states_are_alike_and_apart_as_they_should() -> None:
    torch.manual_seed(1234)
    seeds = {}
    for tp_rank in range(64):
        for batch in range(64):
            tracker = Tracker(tp_rank, batch)
            tracker.follow()
            seeds[tp_rank, batch] = tracker.seeds
    for (tp_rank, batch), found in seeds.items():
        assert found["data-parallel"] == seeds[0, batch]["data-parallel"]
        assert tp_rank == batch == 0 or found["tensor-parallel"] != seeds[0, 0]["tensor-parallel"]
    # the CPU generator reads the lower half of a seed only
    for name, count in (("data-parallel", 64), ("tensor-parallel", 64**2), ("expert", 64**2)):
        assert len({found[name] % 2**32 for found in seeds.values()}) == count, name


def test_forks_against_generators_of_ones_own() -> None:
    """Nested blocks, the same one inside itself, an error inside, and what is left outside."""
    TRACKER.place(1, 0)
    torch.manual_seed(5)
    outside = generator(5)
    torch.randint(2, (), generator=outside)  # the mark of the seeding
    tensor, data = generator(5 + 2718 + 1), generator(5)

    def drawn(source: torch.Generator) -> torch.Tensor:
        return torch.randn(3, generator=source)

    for _ in range(2):
        with rng.fork("tensor-parallel"):
            assert torch.equal(torch.randn(3), drawn(tensor))
            with rng.fork("data-parallel"):
                assert torch.equal(torch.randn(3), drawn(data))
                with rng.fork("tensor-parallel"), rng.fork("tensor-parallel"):
                    assert torch.equal(torch.randn(3), drawn(tensor))
                assert torch.equal(torch.randn(3), drawn(data))
                with rng.fork("default"):
                    assert torch.equal(torch.randn(3), drawn(outside))
            assert torch.equal(torch.randn(3), drawn(tensor))
        assert torch.equal(torch.randn(3), drawn(outside))
        with pytest.raises(KeyError), rng.fork("expert"):
            raise KeyError
    assert TRACKER.active == ["default"]


def test_torch_manual_seed_decides() -> None:
    def draws() -> torch.Tensor:
        with rng.fork("expert"):
            return torch.randn(3)

    torch.manual_seed(1)
    first, second = draws(), draws()
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(draws(), first)
    torch.manual_seed(2)
    torch.randn(3)
    assert not torch.equal(draws(), first)
    rng.manual_seed(1)
    assert torch.equal(draws(), first) and torch.equal(draws(), second)


def test_added_states() -> None:
    torch.manual_seed(3)
    rng.add("router", 77)
    with rng.fork("router"):
        assert torch.equal(torch.randn(2), torch.randn(2, generator=generator(80)))
    with pytest.raises(autoshard.AutoshardError, match="'router' with offset 1 is there already"):
        rng.add("router", 1)
    with pytest.raises(autoshard.AutoshardError, match="offset 77 is there"):
        rng.add("other", 77)
    with pytest.raises(autoshard.AutoshardError, match="no random state 'tp'.*Choose one of"):
        rng.fork("tp").__enter__()


def states_drawn() -> list[torch.Tensor]:
    found = [torch.randn(2)]
    for name in ("data-parallel", "tensor-parallel", "expert"):
        with rng.fork(name):
            found.append(torch.randn(2))
    return found


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_states_save_and_load_through_a_distributed_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(9)
    states_drawn()
    dcp.save({"rng": rng.get_state()}, checkpoint_id=tmp_path, no_dist=True)
    expected = states_drawn() + states_drawn()
    torch.manual_seed(10)
    states_drawn()
    loaded = {"rng": rng.get_state()}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    rng.set_state(loaded["rng"])
    for found, want in zip(states_drawn() + states_drawn(), expected):
        assert torch.equal(found, want)


def test_states_of_another_place_are_an_error() -> None:
    states = rng.get_state()
    TRACKER.place(1, 0)
    with pytest.raises(autoshard.AutoshardError, match="are those of .'dp0_tp0'., .* dp0_tp1"):
        rng.set_state(states)


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("context_fn", [rng.checkpoint_contexts, None])
def test_eager_recomputation_draws_what_forward_drew(context_fn: Any, steps: int) -> None:
    """Also where checkpoint found torch's generator as the seeding left it (no steps before)."""
    seen = []

    def block(x: torch.Tensor) -> torch.Tensor:
        with rng.fork("tensor-parallel"):
            noise = torch.randn(4)
        seen.append((noise, torch.randn(4)))
        return (x * noise).sin()

    x = torch.ones(4, requires_grad=True)
    torch.manual_seed(0)
    for _ in range(steps):
        block(x)
    options = {"context_fn": context_fn} if context_fn else {}
    out = checkpoint(block, x, use_reentrant=False, **options)
    if context_fn is None:
        with pytest.raises(autoshard.AutoshardError, match="would draw other numbers.*context_fn"):
            out.sum().backward()
        return
    out.sum().backward()
    (first, plain), (again, plain_again) = seen[steps:]
    assert torch.equal(plain, plain_again) and torch.equal(first, again)
    after = states_drawn()
    torch.manual_seed(0)
    for _ in range(steps + 1):
        block(x)
    for found, want in zip(states_drawn(), after):
        assert torch.equal(found, want)


class Dropping(nn.Module):
    """One dropout on whole values, one on shards (a plan is free to choose, and tests look)."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name = name
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.up(x)
        if self.name is None:
            h = F.dropout(torch.ones_like(h) + 0 * h, 0.5)
        else:
            with rng.fork(self.name):
                h = F.dropout(torch.ones_like(h) + 0 * h, 0.5)
        y = self.down(torch.relu(h))
        return F.dropout(torch.ones_like(y) + 0 * y, 0.5), h


def tracked(model: nn.Module, x: torch.Tensor, tp: int) -> tuple[Program, list[Any]]:
    whole = {"sequence_parallel": False}
    options = {"mesh": {"tp": tp}, "rng": "tracker", "planner": whole, "hardware": "h100"}
    (program,), values = programs(model, (x,), [options])
    return program, values


def drawn_masks(program: Program, values: list[Any]) -> list[list[torch.Tensor]]:
    """What each rank's two dropouts keep, from the ranks' own programs, weights aside."""
    from autoshard.verification.program_check import split

    n = program.axis.size
    serial, decisions = program.serial, program.decisions
    placeholders = [node for node in serial.graph.nodes if node.op == "placeholder"]
    shards = [
        split(v.detach(), decisions.stored.get(node, "I"), n)
        for v, node in zip(values, placeholders)
    ]

    def rank(axis: Axis, local: fx.GraphModule) -> list[torch.Tensor]:
        outputs = local(*[shard[axis.rank] for shard in shards])
        return [out.detach() for out in outputs]

    found: list[list[torch.Tensor]] = run_ranks(
        n, rank, prepare=lambda axis: rank_program(serial, (Localize(decisions),), axis)[0]
    )
    return found


def random_states(program: Program) -> list[str]:
    return [
        program.decisions.state(n)
        for n in program.serial.graph.nodes
        if str(n.target).startswith("autoshard.dropout")
    ]


@pytest.mark.parametrize("n", [2, 4])
def test_whole_values_draw_alike_and_shards_apart(n: int) -> None:
    program, values = tracked(Dropping(), torch.randn(512, 64), n)
    states = random_states(program)
    assert states == ["S(1)", "I"], "the plan is not the one this test is about"
    torch.manual_seed(3)
    found = drawn_masks(program, values)
    for masks in found:  # the sharded one leaves the program gathered
        assert torch.equal(masks[1], found[0][1])
    for rank, masks in enumerate(found):
        masks[1] = masks[1].chunk(n, 1)[rank]
    for rank in range(n):
        whole, shard = found[rank]
        assert torch.equal(whole, found[0][0])
        assert shard.shape == (512, 256 // n)
        for other in range(rank):
            agree = (shard == found[other][1]).double().mean()
            assert abs(agree - 0.5) < 5 * 0.5 / math.sqrt(shard.numel())
        for mask in (whole, shard):
            kept = (mask != 0).double().mean()
            assert abs(kept - 0.5) < 5 * 0.5 / math.sqrt(mask.numel())
    # against the generators by hand
    for rank in range(n):
        seeds = [
            int(
                torch.randint(
                    random_ops._int64.min, random_ops._int64.max, (), generator=generator(s)
                )
            )
            for s in (3, 3 + 2718 + rank)
        ]
        for mask, seed, call in zip(found[rank], seeds, (1, 0)):
            want = torch.ops.autoshard.dropout(
                torch.ones(mask.shape), torch.tensor(seed), 0.5, call
            )
            assert torch.equal(mask, want)
    torch.manual_seed(3)
    assert torch.equal(drawn_masks(program, values)[0][0], found[0][0])


@pytest.mark.parametrize("name", ["expert", "default", None])
def test_a_fork_in_traced_code_names_the_state(name: str | None) -> None:
    program = autoshard.trace(Dropping(name), (torch.randn(8, 64),), mesh={"tp": 2}, rng="tracker")
    seeds = [
        n.args[1:]
        for n in program.serial.graph.nodes
        if n.target is torch.ops.autoshard.tracked_seeds.default
    ]
    usual = ("data-parallel", "tensor-parallel")
    own = {"expert": ("data-parallel", "expert"), "default": ("default", "tensor-parallel")}
    assert sorted(seeds) == sorted({own.get(name or "", usual), usual})
    assert not any(n.target is streams.region for n in program.serial.graph.nodes)


def test_a_fork_in_traced_code_is_nothing_to_other_backends() -> None:
    model, x = Dropping("expert"), torch.randn(8, 64)
    torch.manual_seed(0)
    want = model.down(torch.relu(model.up(x)))
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert compiled(x)[0].shape == want.shape


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of Inductor's own
@pytest.mark.parametrize(
    "inner", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_one_process_draws_from_its_states(inner: str) -> None:
    """Eager and compiled code draw alike; dropout again in a checkpointed region, too."""

    class Model(nn.Module):
        def __init__(self, again: bool) -> None:
            super().__init__()
            self.lin, self.again = nn.Linear(8, 8), again

        def block(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(self.lin(x).sin(), 0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.again:
                return checkpoint(self.block, x, use_reentrant=False).sum()  # type: ignore[no-any-return]
            return self.block(x).sum()

    results = []
    for again in (False, True):
        torch.manual_seed(0)
        model, x = Model(again), torch.randn(4, 8)
        compiled: Any = torch.compile(
            model, backend="autoshard", options={"inner": inner, "rng": "tracker"}
        )
        torch.manual_seed(4)
        loss = compiled(x)
        loss.backward()
        seed = int(
            torch.randint(random_ops._int64.min, random_ops._int64.max, (), generator=generator(4))
        )
        mask = torch.ops.autoshard.dropout(torch.ones(4, 8), torch.tensor(seed), 0.5, 0)
        torch.testing.assert_close(loss, (model.lin(x).sin() * mask).sum())
        results.append(model.lin.weight.grad)
    torch.testing.assert_close(*results, rtol=1e-6 * (inner == "inductor"), atol=0)


def test_a_checkpoint_that_is_not_compiled_whole_is_an_error() -> None:
    """torch.utils.checkpoint around a compiled block: its second run would draw anew."""
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    options = {"inner": "eager", "rng": "tracker"}
    compiled = torch.compile(model, backend="autoshard", options=options)
    x = torch.randn(4, 8)
    with pytest.raises(autoshard.AutoshardError, match="would draw other numbers"):
        checkpoint(compiled, x, use_reentrant=False).sum().backward()
    out = checkpoint(compiled, x, use_reentrant=False, context_fn=rng.checkpoint_contexts)
    (found,) = torch.autograd.grad(out.sum(), model[0].bias)
    torch.testing.assert_close(found, 2.0 * (out != 0).sum(0))


def trained_in_tracker_mode() -> dict[str, Any]:
    """Two steps on two processes; the loss, whether ranks agree, and the states after."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 8), nn.Dropout(0.5))
    options = {"mesh": {"tp": 2}, "inner": "aot_eager", "rng": "tracker"}
    compiled = torch.compile(model, backend="autoshard", options=options)
    torch.manual_seed(1)
    losses = []
    for _ in range(2):
        loss = compiled(torch.ones(4, 8)).square().sum()
        loss.backward()
        losses.append(float(loss))
    return {"losses": losses, "drawn": [t.tolist() for t in states_drawn()], "seeds": TRACKER.seeds}


def test_two_processes(gloo2: Any) -> None:
    first, second = gloo2(trained_in_tracker_mode)
    assert first["losses"] == second["losses"] and first["losses"][0] != first["losses"][1]
    alike = [a == b for a, b in zip(first["drawn"], second["drawn"])]
    assert alike == [True, True, False, False]
    assert second["seeds"]["tensor-parallel"] == first["seeds"]["tensor-parallel"] + 1


def seeded_apart() -> str:
    import torch.distributed as dist

    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    options = {"mesh": {"tp": 2}, "inner": "eager", "rng": "tracker"}
    torch.manual_seed(dist.get_rank())
    try:
        torch.compile(model, backend="autoshard", options=options)(torch.ones(4, 8))
    except Exception as error:  # Dynamo wraps what a backend raises
        return str(error)
    return "nothing was raised"


def test_ranks_that_were_seeded_apart_are_told(gloo2: Any) -> None:
    for text in gloo2(seeded_apart):
        assert "disagree on the plan" in text and "rank 1: torch.initial_seed() 1" in text
