"""Training where dp_shard keeps some weights whole, gathers some once and some twice: steps, sums
in no_sync, other lengths, and checkpoints that move to a mesh without choices and back."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from autoshard.runtime.collectives import CHOICES, ONCE, TWICE, WHOLE
from autoshard.verification.comparison import furthest
from joined_batch import Sizes, part, train
from models import CASES
from side_by_side import difference, whole


def mixture(tp: int, name: str = "mlp") -> Any:
    """A plan that has every choice for some parameter, and says no more."""
    from autoshard.planning import Plan

    names = [name for name, _ in CASES[name].make_model().named_parameters()]
    return Plan("tp", tp, weights={each: CHOICES[i % 3] for i, each in enumerate(names)})


def steps(sizes: Sizes, micro: list[int], name: str = "mlp", **options: Any) -> dict[str, Any]:
    plan = mixture(sizes.get("tp", 1), name)
    return train(name, sizes, micro, {"plan": plan, **options}, wait=True)


def check(results: list[dict[str, Any]]) -> None:
    for result in results:
        for kind in ("loss", "gradient", "norm", "parameter"):
            assert result[kind] < 1e-5, result


def test_steps_with_a_mixture(gloo2: Any) -> None:
    results = gloo2(steps, {"dp_shard": 2}, [1, 3, 1])
    check(results)
    for result in results:  # some are whole
        assert result["total"] / 2 * 1.05 < result["local"] < result["total"], result


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2}])
def test_steps_with_a_mixture_beside_another_axis(gloo4: Any, sizes: Sizes) -> None:
    check(gloo4(steps, sizes, [1, 3, 1]))


@pytest.mark.slow
@pytest.mark.parametrize("waits", [False, True])
def test_steps_with_a_mixture_of_experts(gloo4: Any, waits: bool) -> None:
    """Rows travel over ep to stacks that are whole on dp_shard, gathered once, gathered twice."""
    sizes = {"dp_shard": 2, "ep": 2}
    check(gloo4(steps, sizes, [1, 3, 1], "mixtral", gradients={"defer": waits}))


def trained(sizes: Sizes, name: str = "mlp", **options: Any) -> tuple[Any, Any, Any]:
    """A model after a step of AdamW, its optimizer, and what steps again."""
    from autoshard.runtime.mesh import data_coordinate, init_mesh

    mesh, case = init_mesh(sizes, "cpu"), CASES[name]
    model = case.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-3)
    settings = {"mesh": sizes, "inner": "aot_eager", **options}
    compiled = torch.compile(model, backend="autoshard", options=settings)

    def step() -> None:
        batch = part(case.make_batch(0), mesh.batches, data_coordinate(mesh))
        case.loss(compiled, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return model, optimizer, step


def there(folder: str, sizes: Sizes, name: str = "mlp", ways: int = 2) -> tuple[float, list[str]]:
    """From a mixture to ZeRO-3, by a checkpoint, and from there to a mixture, or the latter alone;
    the worst difference one step later, and what was
    decided for the parameters of a mixture that a later graph planned."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    from autoshard import programs
    from autoshard.runtime.parameters import choice_of

    kinds = {"plan": mixture(sizes.get("tp", 1), name)}, {"zero": 3}
    worst = 0.0
    for i, (one, other) in enumerate((kinds, kinds[::-1])[-ways:]):
        model, optimizer, step = trained(sizes, name, **one)
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/{i}")
        moved, its_optimizer, its_step = trained(sizes, name, **other)
        with torch.no_grad():
            for p in moved.parameters():
                p.zero_()
        weights, moments = get_state_dict(moved, its_optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/{i}")
        set_state_dict(moved, its_optimizer, model_state_dict=weights, optim_state_dict=moments)
        step()
        its_step()
        pairs = zip(model.parameters(), moved.parameters(), strict=True)
        worst = furthest([worst, *(difference(p, whole(q), 1.0) for p, q in pairs)])
    found = [choice_of(p) for p in moved.parameters()]
    (program,) = programs(moved)
    named = dict(moved.named_parameters())
    assert program.plan.weights == {name: choice_of(p) for name, p in named.items()}
    for p in moved.parameters():
        assert isinstance(p, DTensor)
        at = (p.device_mesh.mesh_dim_names or ()).index("dp_shard")
        assert p.placements[at].is_replicate() == (choice_of(p) == WHOLE)
    return worst, found


def test_a_checkpoint_moves_to_zero_3_and_back(gloo2: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for worst, found in gloo2(there, folder, {"dp_shard": 2}):
            assert worst < 1e-6
            assert {ONCE, TWICE, WHOLE} == set(found)


@pytest.mark.slow
def test_a_checkpoint_of_experts_moves_from_zero_3(gloo4: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for worst, found in gloo4(there, folder, {"dp_shard": 2, "ep": 2}, "mixtral", 1):
            assert worst < 1e-5
            assert {ONCE, TWICE, WHOLE} == set(found)
