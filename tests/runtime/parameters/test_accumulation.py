"""Gradient accumulation: what is communicated each microbatch, and what waits."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard.errors import AutoshardError
from autoshard.program import Program
from autoshard.runtime.parameters.record import pending_of
from autoshard.verification.comparison import furthest
from joined_batch import Sizes, check, part, train
from models import CASES
from side_by_side import difference, whole


def program(mesh: Sizes, microbatch: str, **config: Any) -> Program:
    case = CASES["mlp"]
    return autoshard.trace(
        case.make_model(), (), case.make_batch(0), mesh=mesh, microbatch=microbatch, **config
    )


DDP = {"dp_replicate": 2}
FSDP = {"dp_shard": 2}
HYBRID = {"dp_replicate": 2, "dp_shard": 2}
SCATTER = ("reduce_scatter", "dp_shard")
REDUCE = ("all_reduce", "dp_replicate")
PARAMETERS = sum(1 for _ in CASES["mlp"].make_model().parameters())


@pytest.mark.parametrize(
    ("mesh", "config", "each", "last", "share"),
    [
        # share: pending elements a rank, of the model's
        (DDP, {}, [], [REDUCE], 1),
        (FSDP, {"zero": 1}, [], [SCATTER], 1),
        (FSDP, {"zero": 2}, [SCATTER], [SCATTER], 0),
        (FSDP, {"zero": 3}, [SCATTER], [SCATTER], 0),
        (FSDP, {"zero": 3, "gradients": {"defer": True}}, [], [SCATTER], 1),
        (HYBRID, {"zero": 1}, [], [SCATTER, REDUCE], 1),
        (HYBRID, {"zero": 3}, [SCATTER], [SCATTER, REDUCE], 1 / 2),
        ({"dp_shard": 2, "tp": 2}, {"zero": 1}, [], [SCATTER], None),
    ],
)
def test_reductions_of_each_microbatch(
    mesh: Sizes, config: dict[str, Any], each: Any, last: Any, share: float | None
) -> None:
    """One collective a parameter (bucket_bytes=1) and a reduction, exactly."""

    def made(microbatch: str) -> tuple[dict[Any, int], int, Program]:
        found = program(mesh, microbatch, planner={"bucket_bytes": 1}, **config)
        backward = [c for c in found.collectives() if c.phase == "backward"]
        reductions = Counter((c.op, c.axis) for c in backward if c.axis != "tp")
        gathers = reductions.pop(("all_gather", "dp_shard"), 0)
        return dict(reductions), gathers, found

    single, accumulate, flush = map(made, ("single", "accumulate", "flush"))
    assert accumulate[0] == dict.fromkeys(each, PARAMETERS)
    assert flush[0] == single[0] == dict.fromkeys(last, PARAMETERS)
    assert accumulate[1] == flush[1] == single[1]  # accumulation changes no gather
    total = sum(p.numel() * p.element_size() for p in CASES["mlp"].make_model().parameters())
    assert single[2].memory(inner="aot_eager").pending == 0
    pending = accumulate[2].memory(inner="aot_eager").pending
    assert flush[2].memory(inner="aot_eager").pending == pending
    if share is not None:
        assert pending == share * total
    else:
        assert total / 2 <= pending < total


def test_an_accumulating_backward_returns_no_gradient() -> None:
    """What is not reduced reaches no parameter: `.grad` stays as it is."""
    backward = program(DDP, "accumulate").joint.backward
    assert backward is not None
    output = backward.graph.output_node().args[0]
    assert all(each is None for each in output)  # type: ignore[union-attr]
    copies = [n for n in backward.graph.nodes if n.target is torch.ops.aten.copy_.default]
    assert len(copies) == PARAMETERS


@pytest.mark.parametrize(
    ("name", "sizes", "options"),
    [
        ("mlp", DDP, {}),
        ("mlp", FSDP, {"zero": 1, "planner": {"bucket_bytes": 60_000}}),
        pytest.param(
            *("mlp", FSDP, {"zero": 3, "gradients": {"defer": True}, "inner": "inductor"}),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_three_steps_of_three_microbatches(
    gloo2: Any, name: str, sizes: Sizes, options: dict[str, Any]
) -> None:
    # programs: the first call is in no_sync, so that there is none that does not wait
    results = gloo2(train, name, sizes, [3] * 3, options, wait=True)
    check(results, sizes.get("dp_shard", 1), programs=2)


@pytest.mark.slow
def test_hybrid(gloo4: Any) -> None:
    results = gloo4(train, "mlp", HYBRID, [3] * 2, {"zero": 2}, wait=True)
    check(results, 2, programs=2)


def waiting_bytes(model: Any) -> int:
    found = (pending_of(parameter) for parameter in model.parameters())
    return sum(p.sum.nbytes for p in found if p is not None and p.sum is not None)


class Twin:
    """A model on a mesh, and its serial copy that gets the mean of all ranks' losses."""

    def __init__(self, sizes: Sizes, **options: Any) -> None:
        from autoshard.runtime.mesh import data_coordinate, init_mesh

        self.case = CASES["mlp"]
        self.model, self.serial = self.case.make_model(), self.case.make_model()
        mesh = init_mesh(sizes, "cpu")
        self.ranks, self.rank = mesh.size, data_coordinate(mesh)
        self.compiled: Any = torch.compile(
            self.model,
            backend="autoshard",
            options={"mesh": sizes, "inner": "aot_eager", **options},
        )

    def loss(self, step: int) -> torch.Tensor:
        batch = part(self.case.make_batch(step), self.ranks, self.rank)
        return self.case.loss(self.compiled, batch)

    def expect(self, *steps: int) -> None:
        """`.grad` is the gradient of these batches."""
        self.serial.zero_grad()
        for step in steps:
            self.case.loss(self.serial, self.case.make_batch(step)).backward()
        for (name, p), q in zip(self.model.named_parameters(), self.serial.parameters()):
            assert p.grad is not None and q.grad is not None
            torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-5, atol=1e-6, msg=name)
        self.model.zero_grad()

    def programs(self) -> int:
        return len(autoshard.programs(self.model))


def in_every_order(options: dict[str, Any], sizes: Sizes) -> list[int]:
    twin = Twin(sizes, **options)
    compiled = twin.compiled
    twin.loss(0).backward()  # a program that does not wait
    twin.expect(0)
    with autoshard.no_sync(compiled):
        twin.loss(1).backward()
        assert all(p.grad is None for p in twin.model.parameters())
    twin.loss(2).backward()
    twin.expect(1, 2)
    assert waiting_bytes(twin.model) == 0
    programs = [twin.programs()]

    with autoshard.no_sync(compiled):  # two forwards before one backward, both accumulating
        first, second = twin.loss(3), twin.loss(4)
        (first + second).backward()
    twin.loss(5).backward()
    twin.expect(3, 4, 5)

    with autoshard.no_sync(compiled):  # an accumulating and a flushing one in one backward
        first = twin.loss(6)
    (first + twin.loss(7)).backward()
    if waiting_bytes(twin.model):  # the flush came first: the next one takes the rest
        twin.loss(8).backward()
        twin.expect(6, 7, 8)
    else:
        twin.expect(6, 7)

    with autoshard.no_sync(compiled):
        waiting = twin.loss(9)
    second, third = twin.loss(10), twin.loss(11)  # two flushing ones
    waiting.backward()
    (second + third).backward()
    twin.expect(9, 10, 11)

    with autoshard.no_sync(twin.model), autoshard.no_sync(compiled):  # nested; the model itself
        twin.loss(12).backward()
    with autoshard.no_sync(compiled):
        twin.model.zero_grad()  # knows .grad only
        twin.loss(13).backward()
    twin.loss(14).backward()
    twin.expect(12, 13, 14)

    with autoshard.no_sync(compiled):
        twin.loss(15).backward()
    autoshard.discard_pending(twin.model)
    twin.loss(16).backward()
    twin.expect(16)
    twin.loss(17).backward()  # nothing is pending: an ordinary step
    twin.expect(17)
    with torch.no_grad():
        twin.loss(18)
        inference = twin.programs()
        with autoshard.no_sync(compiled):
            twin.loss(18)
        assert twin.programs() == inference
    return [*programs, inference]


@pytest.mark.parametrize(("sizes", "options"), [(DDP, {}), (FSDP, {"zero": 1, "inner": "eager"})])
def test_in_every_order(gloo2: Any, sizes: Sizes, options: dict[str, Any]) -> None:
    assert gloo2(in_every_order, options, sizes) == [[3, 4]] * 2


def steps_too_early() -> str:
    twin = Twin(DDP)
    with autoshard.no_sync(twin.compiled):
        twin.loss(0).backward()
    optimizer = torch.optim.SGD(twin.model.parameters(), lr=0.1)
    with pytest.raises(AutoshardError) as caught:
        optimizer.step()
    twin.loss(1).backward()
    optimizer.step()
    return str(caught.value)


def test_a_step_with_unreduced_gradients_is_an_error(gloo2: Any) -> None:
    for said in gloo2(steps_too_early):
        assert f"{PARAMETERS} parameters have gradients" in said and "discard_pending" in said


class Halves(nn.Module):
    """A weight that two graphs use, with a gather in eager code between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(6, 6)
        self.between = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        x = self.eager(x)
        return torch.tanh(self.first(x)).square().mean()

    @torch.compiler.disable
    def eager(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.between.weight + self.between.bias


def across_a_break(sizes: Sizes, zero: int) -> float:
    from autoshard.runtime.mesh import data_coordinate, init_mesh

    rank = data_coordinate(init_mesh(sizes, "cpu"))
    model, serial = Halves(), Halves()
    options = {"mesh": sizes, "inner": "aot_eager", "zero": zero}
    compiled = torch.compile(model, backend="autoshard", options=options)
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for _ in range(2):
        for i in range(3):
            x = torch.randn(8, 6, generator=generator)
            serial(x).backward()
            with autoshard.no_sync(compiled) if i < 2 else contextlib.nullcontext():
                compiled(x.chunk(2)[rank]).backward()
            assert i == 2 or all(p.grad is None for p in model.parameters())
        for p, q in zip(model.parameters(), serial.parameters()):
            assert p.grad is not None and q.grad is not None
            worst = furthest([worst, difference(p.grad, q.grad, 1.0)])
        model.zero_grad()
        serial.zero_grad()
    return worst


@pytest.mark.parametrize(("sizes", "zero"), [(DDP, 3), (FSDP, 1)])
def test_across_a_graph_break(gloo2: Any, sizes: Sizes, zero: int) -> None:
    """Tied uses in two graphs, and a parameter that only eager code reads."""
    assert furthest(gloo2(across_a_break, sizes, zero)) < 1e-6


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x)).sum()


def a_part_of_a_graph() -> str:
    model = Wrapped()
    compiled = torch.compile(model, backend="autoshard", options={"mesh": DDP, "inner": "eager"})
    compiled(torch.ones(2, 4)).backward()
    with pytest.raises(Exception, match="inside and outside of no_sync") as caught:
        with autoshard.no_sync(model.a):
            compiled(torch.ones(2, 4))
    return str(caught.value)


def test_a_part_of_a_graph_cannot_wait(gloo2: Any) -> None:
    assert all("the whole model" in said for said in gloo2(a_part_of_a_graph))


class Output:
    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


def test_the_loop_in_the_documentation() -> None:
    """In a world of one, where nothing waits: the gradient is that of all batches."""
    text = (Path(__file__).parents[3] / "docs" / "data_parallel.md").read_text()
    loop = re.search(r"```python\n(for i, batch .*?)```", text, re.DOTALL)
    assert loop is not None
    inner = nn.Linear(3, 1, bias=False)
    compiled: Any = torch.compile(inner, backend="autoshard", options={"inner": "eager"})

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> Output:
            return Output(compiled(x).sum())

    model = Model()
    model.add_module("inner", inner)
    batches = [{"x": torch.full((2, 3), float(i))} for i in range(3)]
    before = inner.weight.detach().clone()
    names = {"contextlib": contextlib, "autoshard": autoshard, "model": model, "batches": batches}
    exec(loop[1], {**names, "optimizer": torch.optim.SGD(inner.parameters(), lr=1.0)})
    torch.testing.assert_close(before - inner.weight, torch.full((1, 3), 2.0))
