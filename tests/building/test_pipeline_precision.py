"""`precision` and autocast beside pp: values against a serial model that casts, and cuts, alike."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.building.pipeline import entry
from autoshard.verification.comparison import furthest
from joined_batch import Sizes
from side_by_side import difference, whole
from token_net import batch

B16, F32 = torch.bfloat16, torch.float32
PARTS, ROWS = 4, 8
"""Micro-batches, and samples of a rank."""

MIXED = {"param": "bfloat16", "reduce": "float32"}


class Tied(nn.Module):
    """The embedding is the head: of two stages one lends it to the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(24, 32)
        self.up = nn.ModuleList(nn.Linear(32, 129) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(129, 32, bias=False) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(4))
        self.head = nn.Linear(32, 24, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.randn(32), requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * self.frozen
        for up, down, norm in zip(self.up, self.down, self.norms):
            x = norm(x + down(torch.relu(up(x))))
        return F.cross_entropy(self.head(x).float().mT, ids)


@torch.enable_grad()
def serial(model: nn.Module, ids: torch.Tensor, dtype: torch.dtype) -> tuple[Any, list[Any]]:
    """The loss of a batch, and its gradients: of each micro-batch in `dtype`, summed in float32;
    so are those of the tied weight's two readers."""
    named = dict(model.named_parameters(remove_duplicate=False))
    low = {k: p.detach().to(dtype).requires_grad_(p.requires_grad) for k, p in named.items()}
    loss, sums = torch.zeros(()), {p: torch.zeros(p.shape) for p in model.parameters()}
    trained = [k for k, p in named.items() if p.requires_grad]
    for rows in ids.chunk(PARTS):
        part = torch.func.functional_call(model, low, (rows,), tie_weights=False) / PARTS
        for k, own in zip(trained, torch.autograd.grad(part, [low[k] for k in trained])):
            sums[named[k]] += own
        loss = loss + part.detach()
    return loss, list(sums.values())


def run(
    sizes: Sizes, options: dict[str, Any], accumulated: int = 1, autocast: bool = False
) -> dict[str, Any]:
    """A step of `accumulated` backwards, all but the last in `no_sync`, and an evaluation."""
    import autoshard
    from autoshard.config import Precision
    from autoshard.runtime.collectives import P
    from autoshard.runtime.mesh import data_coordinate, init_mesh
    from autoshard.runtime.parameters import data_unsharding, stage_unsharding
    from autoshard.runtime.pipeline.channel import GroupChannel

    mesh, model, before = init_mesh(sizes, "cpu"), Tied(), Tied()
    ranks, own = mesh.batches, data_coordinate(mesh)
    dtype = Precision.of(options.get("precision")).param or F32
    compiled: Any = torch.compile(
        model,
        backend="autoshard",
        options={"mesh": sizes, "inner": "eager", "pipeline": {"microbatches": PARTS}, **options},
    )
    moved: dict[str, set[torch.dtype]] = {"gather": set(), "reduce": set(), "send": set()}

    def noting(what: str, function: Any, at: int = 0) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            given = args[at] if isinstance(args[at], list) else [args[at]]
            if what != "reduce" or args[1] == P:
                moved[what] |= {x.dtype for x in given}
            return function(*args, **kwargs)

        return noted

    compared: set[str] = set()

    def region(*args: Any, **kwargs: Any) -> Any:
        compared.update(*kwargs.get("moved", {}).values())
        return made(*args, **kwargs)

    made = entry.CollectiveRegion
    wants: list[Any] = [torch.zeros(p.shape) for p in before.parameters()]
    loss, gathered = 0.0, stage_unsharding.all_gather
    with contextlib.ExitStack() as stack:
        for owner, name, wrapped in (
            (stage_unsharding, "all_gather", noting("gather", gathered)),
            (data_unsharding, "convert", noting("reduce", data_unsharding.convert)),
            (GroupChannel, "send", noting("send", GroupChannel.send, 2)),
            (entry, "CollectiveRegion", region),
        ):
            stack.enter_context(mock.patch.object(owner, name, wrapped))
        stack.enter_context(torch.autocast("cpu", dtype=B16, enabled=autocast))
        for step in range(accumulated):
            parts = batch(step, ROWS * ranks).chunk(ranks)
            found = [serial(before, ids, dtype) for ids in parts]
            early = step + 1 < accumulated
            with autoshard.no_sync(compiled) if early else contextlib.nullcontext():
                got = compiled(parts[own])
                got.backward()
            loss = furthest([loss, difference(got, found[own][0])])
            for i, grads in enumerate(zip(*[grads for _, grads in found])):
                wants[i] += sum(grads) / ranks
    gradients = {}
    for (name, p), want in zip(model.named_parameters(), wants):
        assert isinstance(p, DTensor) and p.dtype is F32
        assert (p.grad is None) == (not p.requires_grad), name
        if p.grad is not None:
            assert p.grad.dtype is F32
            gradients[name] = difference(p.grad, want)
    with torch.no_grad(), torch.autocast("cpu", dtype=B16, enabled=autocast):
        ids = batch(9, ROWS)
        loss = furthest([loss, difference(compiled(ids), serial(before, ids, dtype)[0])])
    return {
        "loss": loss,
        "gradient": furthest(gradients.values()),
        "where": gradients,
        "eager": difference(whole(model.embed.weight.detach()), before.embed.weight),
        "moved": moved,
        "compared": compared,
    }


def check(results: list[dict[str, Any]], tolerance: float) -> None:
    for result in results:
        assert furthest([result["loss"], result["gradient"]]) <= tolerance, result
        assert result["eager"] == 0.0


@pytest.mark.parametrize(
    "sizes",
    [
        {"pp": 2},
        {"pp": 2, "dp_shard": 2},
    ],
)
def test_against_a_serial_model_that_casts_alike(gloo2: Any, gloo4: Any, sizes: Sizes) -> None:
    """Sums of micro-batches in bf16 would be off by 4e-3."""
    results = (gloo4 if len(sizes) == 2 else gloo2)(run, sizes, {"precision": MIXED})
    check(results, 1e-6)
    for result in results:
        assert result["moved"]["gather"] == ({B16} if len(sizes) == 2 else set())
        assert result["moved"]["reduce"] == ({F32} if len(sizes) == 2 else set())
        assert B16 in result["moved"]["send"]  # hidden states, what is lent
    trained = {name for name, p in Tied().named_parameters() if p.requires_grad}
    compared = set().union(*(result["compared"] for result in results))
    assert compared == (trained if len(sizes) == 2 else set()), "the ranks compare what they reduce"
    borrows = results[-1]["moved"]["send"]
    assert F32 in borrows  # the sum of the gradients of what it was lent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "options", "accumulated", "tolerance"),
    [
        (
            {"pp": 2},
            {
                "precision": MIXED,
                "pipeline": {"schedule": "zb1", "microbatches": PARTS},
                "inner": "aot_eager",
            },
            1,
            1e-6,
        ),
        ({"pp": 2, "dp_shard": 2}, {"precision": MIXED}, 2, 1e-6),
        # gradients travel in bf16; partial sums of tp ranks are in bf16
        ({"pp": 2, "dp_replicate": 2}, {"precision": {"param": "bfloat16"}}, 2, 1e-2),
        ({"pp": 2, "tp": 2}, {"precision": MIXED}, 1, 5e-2),
    ],
)
def test_other_schedules_and_axes(
    gloo2: Any,
    gloo4: Any,
    sizes: Sizes,
    options: dict[str, Any],
    accumulated: int,
    tolerance: float,
) -> None:
    pool = gloo4 if len(sizes) == 2 else gloo2
    check(pool(run, sizes, options, accumulated), tolerance)


@pytest.mark.parametrize(("options", "width"), [({}, 4), ({"precision": MIXED}, 2)])
def test_buckets_are_of_the_bytes_that_travel(
    monkeypatch: pytest.MonkeyPatch, world_of_four: None, options: dict[str, Any], width: int
) -> None:
    """And what a pipeline is cut into stands in torch's structured trace; what trains is fitted."""
    found: list[list[int]] = []
    fitted: list[list[int]] = []
    traced: dict[str, str] = {}

    def noted(sizes: list[int], *args: Any, **kwargs: Any) -> Any:
        found.append(sizes)
        return filled(sizes, *args, **kwargs)

    filled = entry.fill_buckets
    monkeypatch.setattr(entry, "fill_buckets", noted)
    monkeypatch.setattr(entry, "fit_stages", lambda _, ranks, config: fitted.append(ranks))
    monkeypatch.setattr(entry, "artifact", lambda name, text: traced.update({name: text()}))
    given = {"mesh": {"pp": 2, "dp_shard": 2}, "inner": "eager", "timeout": 20, **options}
    compiled: Any = torch.compile(
        Tied(), backend="autoshard", options={**given, "pipeline": {"microbatches": PARTS}}
    )
    compiled(batch(0, ROWS))
    with torch.no_grad():
        compiled(batch(0, ROWS))
    layer = [129 * 32, 129, 32 * 129, 32, 32]
    assert sorted(found[0]) == sorted(width * size for size in [24 * 32, 32, *layer, *layer])
    assert fitted == [[0]] and len(found) == 2
    assert "2 stages" in traced["autoshard_pipeline"]


def test_autocast_around_the_call(gloo2: Any) -> None:
    check(gloo2(run, {"pp": 2}, {}, autocast=True), 1e-6)


class Normed(nn.Module):
    """Reads its input as it is, and what a layer takes in the dtype of its weight; writes to
    statistics that a backward reads. Makes no loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.norm = nn.BatchNorm1d(6, affine=False)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x * x)
        for layer in self.layers:
            x = torch.relu(layer(x.to(layer.weight.dtype)))
        return x.float()


def run_with_gradient_of_input(sizes: Sizes, options: dict[str, Any]) -> list[float]:
    """How far the gradient of an input, in two steps, is from that of a serial model that casts
    alike."""
    model, low = Normed(), Normed()
    low.layers.to(B16)
    options = {"mesh": sizes, "inner": "eager", **options}
    compiled: Any = torch.compile(model, backend="autoshard", options=options)
    found = []
    for _ in range(2):
        x, serial_x = (batch(0, ROWS).div(7).requires_grad_() for _ in range(2))
        compiled(x).square().mean().backward()
        low(serial_x).square().mean().backward()
        found.append(difference(x.grad, serial_x.grad))
    return found


@pytest.mark.filterwarnings("ignore:.*(all forwards of a step, then|one micro-batch)")
def test_an_input_with_a_gradient_and_statistics_that_are_written(gloo2: Any) -> None:
    results = gloo2(run_with_gradient_of_input, {"pp": 2}, {"precision": MIXED})
    assert furthest(n for found in results for n in found) <= 1e-6
