"""A deep model is searched by a few of its layers; what is proposed of axes together."""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from autoshard.capture import capture, intercept
from autoshard.config import Config
from autoshard.mesh_search import MeshSearch, deep_graphs, equal_layers, search_meshes
from autoshard.mesh_search.deep_graphs import Screened, shallow
from autoshard.mesh_search.equal_layers import PLANS, Layers, worth_a_plan
from autoshard.mesh_search.factorisations import Asked, planned_axes
from autoshard.mesh_search.search import prices_of, search_captured
from autoshard.parameters import lowered_dtypes
from autoshard.planning.cost import cluster
from autoshard.planning.estimate import Training
from autoshard.runtime import compat
from autoshard.runtime.graph_meta import MUTATED

Axes = dict[str, int]
H100 = replace(cluster("h100"), per_node=2)
WIDTH, TOKENS = 512, 2048


class Gated(nn.Module):
    """Equal layers of each token."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(layers))
        self.gate = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(layers))
        self.head = nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x)
        for norm, up, gate, down in zip(self.norms, self.up, self.gate, self.down):
            inner = norm(x)
            x = x + torch.tanh(down(torch.sigmoid(gate(inner)) * torch.tanh(up(inner))))
        return self.head(x).square().mean()


def made(layers: int) -> tuple[nn.Module, torch.Tensor]:
    torch.compiler.reset()
    with torch.device("meta"):
        return Gated(layers), torch.empty(2, TOKENS, WIDTH)


def search(layers: int, world: int, **given: Any) -> MeshSearch:
    model, x = made(layers)
    return search_meshes(model, (x,), world=world, hardware=H100, **given)


def rate_of(found: MeshSearch) -> float:
    """Batches that a rank does in a second, of the one mesh of a search."""
    (row,) = found.rows
    alike = math.prod(row.mesh.get(name, 1) for name in ("pp", "cp", "tp"))
    return row.microbatches / (row.timing.step * alike)


MESHES: list[Axes] = [
    {"dp_shard": 2, "tp": 2},
    {"dp_shard": 2, "cp": 2},
    {"cp": 2, "tp": 2},
    {"pp": 3, "dp_shard": 2},
]


def test_layers_price_a_mesh_as_the_whole_graph_does() -> None:
    """With all the memory that a rank needs, and with less."""

    def both(
        gm: fx.GraphModule, example_inputs: Any, inputs: list[compat.GraphInput]
    ) -> list[tuple[Screened | None, tuple[bool, float], MeshSearch]]:
        captured = capture(gm, example_inputs, lowered_dtypes(inputs))
        short = shallow(captured, inputs)
        assert short is not None and short.count == 12
        assert len(short.graph.graph.nodes) < 0.5 * len(captured.graph.nodes)
        found = []
        for mesh in MESHES:
            whole = search_captured(captured, inputs, [mesh], H100, Config())
            for part in (1.0, 0.7):
                limit = int(part * whole.rows[0].memory.total)
                if part < 1:
                    config = Config(memory_budget=limit)
                    whole = search_captured(captured, inputs, [mesh], H100, config)
                asked = Asked(Config(), Training(), limit, None, 1)
                axes = planned_axes(mesh, asked.config)
                prices = prices_of(short.graph, short.inputs, axes, H100, asked)
                layers = Layers(prices, short)
                found.append((layers.screened(mesh), layers.at_most(mesh), whole))
        return found

    model, x = made(12)
    for one, (possible, most), whole in intercept(model, (x,), None, both):
        assert one is not None and one.fits == whole.rows[0].fits
        assert one.rate <= most < 3 * one.rate and possible >= one.fits
        assert one.rate == pytest.approx(rate_of(whole), rel=0.1), one


def test_a_deep_search_is_no_worse_than_any_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    few = search(12, 4)
    monkeypatch.setattr(deep_graphs, "FEWEST", 1000)
    every = search(12, 4)
    assert few.best and every.best and len(few.rows) < len(every.rows)
    assert few.best.mfu >= 0.99 * every.best.mfu and few.reason()
    for mesh in ({"cp": 2, "tp": 2}, {"pp": 2, "cp": 2}, {"pp": 2, "tp": 2}):
        row = next(one for one in every.rows if mesh.items() <= one.mesh.items())
        if (pipeline := row.pipeline) is not None:  # beside 1f1b, which a mesh that is named has
            (named,) = search(12, 4, mesh=row.mesh).rows
            assert pipeline.order[0] == "interleaved" and row.timing.step < named.timing.step


def test_what_data_parallel_axes_send_leaves_fewer_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the same proposal: a larger micro-batch, which sends it less often, is tried later."""
    monkeypatch.setattr(sys.modules[__name__], "TOKENS", 8)
    plans = mock.Mock(wraps=equal_layers._layers)
    monkeypatch.setattr(equal_layers, "_layers", plans)
    few, count = search(12, 8, global_batch=128), plans.call_count
    monkeypatch.setattr(Layers, "data", lambda *_: 0.0)
    plans.reset_mock()
    every = search(12, 8, global_batch=128)
    assert count < plans.call_count and few.best and every.best
    assert few.best.mesh == every.best.mesh and few.best.mfu == every.best.mfu


Chain = Callable[..., tuple[torch.Tensor]]


UNARY = "sin cos abs neg tanh exp atan sinh sigmoid erf relu floor ceil sign square".split()


def chain(
    reads: Callable[[list[torch.Tensor], list[torch.Tensor]], torch.Tensor], before: int = 0
) -> Chain:
    """Layers of a weight each, which also read what `reads` says of (all values so far, `more`),
    behind some longer ones without."""

    def run(*given: torch.Tensor) -> tuple[torch.Tensor]:
        values, more, weights = [given[0].cos()], [*given[1:3]], given[3:]
        for name in UNARY * before:
            values[0] = getattr(values[0], name)()
        for weight in weights:
            y = values[-1] @ weight
            x = reads(values, more) + ((y.sin() + 1) * y.cos() - y.abs()).tanh() * 0.5
            values.append(x + values[-1])
        return (values[-1].sum(),)

    return run


CHAINS: dict[str, tuple[Chain, int, int]] = {
    "equal": (chain(lambda values, more: more[0] * more[1]), 12, 12),
    "behind others": (chain(lambda values, more: more[0] * more[1], 3), 12, 12),
    "one": (chain(lambda values, more: more[0] * more[1]), 1, 0),
    "few": (chain(lambda values, more: more[0] * more[1]), 11, 0),
    "of two kinds": (chain(lambda values, more: more[len(values) % 2] * 2), 24, 12),
    "of two kinds, few": (chain(lambda values, more: more[len(values) % 2] * 2), 22, 0),
    "that read the first": (chain(lambda values, more: values[0] * 2), 12, 12),
    "that read the first layer": (chain(lambda values, more: values[:2][-1] * 2), 12, 0),
    "that read two before": (chain(lambda values, more: values[-2:][0] * 2), 12, 0),
}


@pytest.mark.parametrize("name", CHAINS)
def test_the_graph_of_three_layers_is_the_one_that_three_make(name: str) -> None:
    run, depth, count = CHAINS[name]
    given = [torch.randn(4, 4) for _ in range(3 + depth)]
    captured = make_fx(run, tracing_mode="fake")(*given)
    names = [f"w{i}" for i in range(-3, depth)]
    same: dict[str, Any] = {"source": "", "key": "", "of_model": True, "real": None, "fake": None}
    inputs = [compat.GraphInput(name=name, **same) for name in names]
    short = shallow(captured, inputs)
    assert (short.count if short is not None else 0) == count
    if short is not None:
        each = depth // count
        assert [one.name for one in short.inputs] == names[: 3 + 3 * each]
        of = [{f"w{i}" for i in range(n * each, (n + 1) * each)} for n in range(3)]
        assert list(short.weights[1:]) == of[1:]
        few = given[: 3 + 3 * each]
        assert torch.equal(short.graph(*few)[0], run(*few)[0])
        captured.meta[MUTATED] = True
        assert shallow(captured, inputs) is None


@pytest.mark.parametrize("seed", range(20))
def test_meshes_worth_a_plan_are_the_best_of_all(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, asked, made = random.Random(seed), list[Any](), list[Any]()
    sizes = itertools.product((1, 2, 4), range(1, 8), (1, 2))
    meshes = [{"pp": pp, "tp": tp, "dp_shard": n} for pp, tp, n in sizes]
    share = draw.choice([0.0, 0.2, 0.9])
    found: dict[int, Screened | None] = {}
    bounds: dict[int, tuple[bool, float]] = {}
    for i, mesh in enumerate(meshes):
        plan = (("tp", mesh["tp"]),)
        one = Screened(mesh, ("1f1b", 1), draw.random(), draw.random() < share, plan, 1)
        found[i] = one if draw.random() < 0.9 and mesh["tp"] < 7 else None
        bounds[i] = one.fits or draw.random() < 0.5, one.rate * draw.uniform(1, 1.5)

    def screened(mesh: Axes) -> Screened | None:
        asked.append(meshes.index(mesh))
        return found[asked[-1]]

    def layers(key: Any, *_: Any) -> Any:
        made.append(key)
        most = SimpleNamespace(at_most=lambda one: bounds[meshes.index(one)], screened=screened)
        most.passes = lambda one: (math.inf, 0.0)
        return most if key != (("tp", 7),) else None

    def planned(mesh: Axes) -> Any:
        return (("tp", mesh["tp"]),)

    def order(one: Screened) -> Any:
        return not one.fits, -one.rate

    monkeypatch.setattr(equal_layers, "_layers", layers)
    given = Asked(Config(), Training(), 0, None, len(meshes))
    chosen = worth_a_plan(meshes, given, lambda one: (None, None))  # type: ignore[arg-type]
    every = sorted((one for one in found.values() if one is not None), key=order)
    every = [one for one in every if one.fits] or every
    best = {planned(one.mesh): one for one in reversed(every)}
    plans = sorted(best, key=lambda plan: order(best[plan]))[:PLANS]
    assert len(made) == 7 and chosen == sorted(chosen, key=order)
    of = {planned(one.mesh): one for one in reversed(chosen)}
    assert of == {plan: best[plan] for plan in plans}
    assert len({(one.mesh["pp"], planned(one.mesh)) for one in chosen}) == len(chosen)
    # what was not asked could not be among the best
    least = best[plans[-1]].rate if share and len(plans) == PLANS else 0.0
    for i in set(range(len(meshes))) - {*asked}:
        assert meshes[i]["tp"] == 7 or not bounds[i][0] or bounds[i][1] < least
    assert len(asked) < len(meshes) - 6 or share < 0.9


@pytest.mark.parametrize("regions", [False, True])
def test_layers_compute_again_no_more_than_they_must(regions: bool) -> None:
    layers: Any = Layers.__new__(Layers)
    layers.asked = SimpleNamespace(limit=100)
    layers.choices = SimpleNamespace(
        stages=SimpleNamespace(choices=SimpleNamespace(regions=regions))
    )
    drawn = [(40, 2, 0.5), (30, 8, 1.0), (10, 3, 4.0)]
    points = layers.choices_between = [equal_layers._LayerChoice(*one) for one in drawn]

    def least(total: int, count: int) -> float | None:
        """Of some layers as one choice says and the rest as the next, of all such."""
        costs = []
        for one, other in [(points[0],) * 2, *itertools.pairwise(points)]:
            for part in (i / 1000 for i in range(1001)):
                kept = one.kept + part * (other.kept - one.kept) - points[0].kept
                if total + count * kept + other.beside - points[0].beside <= 100 + 1e-9:
                    costs.append(one.seconds + part * (other.seconds - one.seconds))
        return min(costs, default=None)  # type: ignore[type-var]

    for total, count in itertools.product(range(90, 200, 3), (1, 3)):
        want = least(total, count) if total > 100 or regions else 0.0
        found = layers.again(SimpleNamespace(total=total), count)
        assert found == (want if want is None else pytest.approx(want, abs=0.004)), (total, count)
    layers.choices_between = []
    assert [layers.again(SimpleNamespace(total=n), 3) for n in (100, 101)] == [0.0, None]
