"""A job goes on on another mesh, from memory: parameters and optimizer states bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autoshard
from autoshard.errors import AutoshardError
from autoshard.verification.comparison import furthest
from joined_batch import everything, one_step, part, trained
from side_by_side import difference, whole

Sizes = dict[str, int]


def moved(name: str, sizes: Sizes, other: Sizes, planned: bool) -> list[float]:
    """After a step on one mesh, a move to another and a step there: how far the parameters are from
    those of a job that stayed. Asserts that the move changes no bit."""
    from autoshard.runtime.mesh import data_coordinate, init_mesh
    from models import CASES

    model, optimizer, _ = trained(sizes, name)
    stays, stays_optimizer, step = trained(sizes, name)
    model.zero_grad()
    before = everything(model, optimizer)
    held = list(model.parameters())
    kwargs = CASES[name].make_batch(0) if planned else None
    assert autoshard.reshard(model, (), kwargs, mesh=other, inner="aot_eager") is model
    after = everything(model, optimizer)
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert torch.equal(after[key], value), key
    for p, listed in zip(model.parameters(), held, strict=True):
        names = p.device_mesh.mesh_dim_names  # type: ignore[union-attr]
        assert p is listed and p in optimizer.state
        assert tuple(name.partition(":")[0] for name in names) == tuple(other)

    mesh = init_mesh(other, "cpu")
    options = {"mesh": other, "inner": "aot_eager"}
    compiled = torch.compile(model, backend="autoshard", options=options)
    one_step(model, compiled, optimizer, mesh.batches, data_coordinate(mesh), name)
    step()
    mine, theirs = everything(model, optimizer), everything(stays, stays_optimizer)
    return [furthest(difference(mine[key], theirs[key], 1.0) for key in mine)]


@pytest.mark.parametrize("planned", [False, True])
def test_from_fsdp_to_tp(gloo2: Any, planned: bool) -> None:
    assert furthest(gloo2(moved, "mlp", {"dp_shard": 2}, {"tp": 2}, planned)[0]) < 1e-5


def offloaded() -> None:
    """States that lie on the host, in float32 beside bfloat16 parameters, and weights that are read
    in another dtype than they are stored in."""
    from autoshard.runtime.mesh import data_coordinate, init_mesh
    from models import CASES

    case, sizes = CASES["mlp"], {"dp_shard": 2}
    model = case.make_model().bfloat16()
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = autoshard.offload_optimizer(plain, master_dtype=torch.float32)
    options = {"mesh": sizes, "inner": "aot_eager", "zero": "auto"}
    compiled = torch.compile(model, backend="autoshard", options=options)
    mesh = init_mesh(sizes, "cpu")
    batch = {
        name: value.bfloat16() if value.is_floating_point() else value
        for name, value in part(case.make_batch(0), mesh.batches, data_coordinate(mesh)).items()
    }
    case.loss(compiled, batch).backward()
    optimizer.step()
    optimizer.zero_grad()

    def held() -> dict[str, torch.Tensor]:
        found = {name: whole(p.detach()) for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            for key, value in optimizer.state[p].items():
                found[f"{name} {key}"] = whole(value)
        return found

    before = held()
    autoshard.reshard(model, mesh={"tp": 2})
    after = held()
    assert {"exp_avg", "master"} <= {key.split()[-1] for key in after}
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert after[key].dtype == value.dtype and torch.equal(after[key], value), key
    target = case.make_model()  # float32 of the bfloat16 that is trained
    autoshard.weights.transfer(model, target)
    for name, value in target.state_dict().items():
        assert torch.equal(value, before[name].float())


def test_states_on_the_host_move_with_their_parameters(gloo2: Any) -> None:
    gloo2(offloaded)


def refused(sizes: Sizes) -> str:
    model, _, _ = trained(sizes)
    next(model.parameters()).grad = torch.zeros_like(next(model.parameters()))
    with pytest.raises(AutoshardError, match="has a gradient") as error:
        autoshard.reshard(model, mesh={"tp": 2})
    return str(error.value)


def test_gradients_that_wait_are_refused(gloo2: Any) -> None:
    assert "zero_grad" in gloo2(refused, {"dp_shard": 2})[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "other"),
    [
        ("mlp", {"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2}),
        ("mlp", {"dp_replicate": 2, "tp": 2}, {"tp": 4}),
        ("mixtral", {"dp_shard": 2, "tp": 2}, {"dp_shard": 2, "ep": 2}),
        ("llama", {"pp": 2, "dp_shard": 2}, {"tp": 4}),
    ],
)
def test_on_four_ranks(gloo4: Any, name: str, sizes: Sizes, other: Sizes) -> None:
    assert furthest(gloo4(moved, name, sizes, other, False)[0]) < 1e-4
