"""torch.distributed.checkpoint between data-parallel meshes: model and AdamW state, bit for bit."""

from __future__ import annotations

import math
import tempfile
from typing import Any

import pytest
import torch
from torch import nn

from autoshard.verification.comparison import furthest
from joined_batch import Sizes, everything, trained
from side_by_side import difference, whole

pytestmark = pytest.mark.slow


def moved(
    folder: str,
    first: Sizes,
    second: Sizes,
    name: str = "mlp",
    ways: tuple[str, str] = ("auto", "auto"),
) -> float:
    """Train on `first`, save, load into another model on `second`, and take one more step on both;
    the worst difference of parameters after it. Asserts that loading is exact. ways: what travels
    over ep."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer, step = trained(first, name, ways[0], fused=True)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)

    other, other_optimizer, other_step = trained(second, name, ways[1], foreach=True)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    weights, moments = get_state_dict(other, other_optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(other, other_optimizer, model_state_dict=weights, optim_state_dict=moments)
    pairs = list(zip(model.parameters(), other.parameters(), strict=True))
    for p, q in pairs:
        assert torch.equal(whole(p), whole(q))
        for key in ("exp_avg", "exp_avg_sq", "step"):
            mine, theirs = optimizer.state[p][key], other_optimizer.state[q][key]
            assert torch.equal(whole(mine), whole(theirs)), key
    step()
    other_step()
    return furthest(difference(p, whole(q), 1.0) for p, q in pairs)


def test_between_meshes_of_four(gloo4: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        mesh = {"dp_shard": 2, "tp": 2}
        assert furthest(gloo4(moved, folder, mesh, {"dp_shard": 4})) < 1e-6
    with tempfile.TemporaryDirectory() as folder:
        mesh = {"dp_replicate": 2, "dp_shard": 2}
        assert furthest(gloo4(moved, folder, {"dp_shard": 4}, mesh)) < 1e-6


def test_from_tp_to_fsdp(gloo2: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert furthest(gloo2(moved, folder, {"tp": 2}, {"dp_shard": 2})) < 1e-6
    with tempfile.TemporaryDirectory() as folder:
        assert furthest(gloo2(moved, folder, {"dp_shard": 2}, {"tp": 2})) < 1e-6


def test_experts_from_tp_to_ep(gloo4: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        meshes = {"dp_shard": 2, "tp": 2}, {"dp_shard": 2, "ep": 2}
        assert furthest(gloo4(moved, folder, *meshes, "mixtral")) < 1e-5


@pytest.mark.parametrize("ways", [("rows", "weights"), ("weights", "rows")])
def test_experts_that_travel_and_stay(gloo2: Any, ways: tuple[str, str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert furthest(gloo2(moved, folder, {"ep": 2}, {"ep": 2}, "mixtral", ways)) < 1e-5


@pytest.mark.slow
def test_experts_on_two_axes_and_back(gloo4: Any) -> None:
    meshes = {"ep": 2, "tp": 2}, {"dp_shard": 2, "ep": 2}
    for first, second in (meshes, meshes[::-1]):
        with tempfile.TemporaryDirectory() as folder:
            assert furthest(gloo4(moved, folder, first, second, "mixtral")) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("other", [{"tp": 4}, {"dp_shard": 4}])
def test_from_cp_and_tp(gloo4: Any, other: Sizes) -> None:
    for meshes in (({"cp": 2, "tp": 2}, other), (other, {"cp": 2, "tp": 2})):
        with tempfile.TemporaryDirectory() as folder:
            assert furthest(gloo4(moved, folder, *meshes, "llama")) < 1e-5


def save(folder: str, model: nn.Module, optimizer: Any) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)


def begin(folder: str, sizes: Sizes) -> dict[str, torch.Tensor]:
    """Train on a mesh, save, and take one more step; the state after it."""
    model, optimizer, step = trained(sizes)
    save(folder, model, optimizer)
    step()
    return everything(model, optimizer)


def go_on(source: str, sizes: Sizes, target: str) -> dict[str, torch.Tensor]:
    """Load on a mesh, in a model that has trained differently, save it again where there is a
    `target`, else take a step; the state after that."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer, step = trained(sizes)
    step()
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=source)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    if target:
        save(target, model, optimizer)
    else:
        step()
    return everything(model, optimizer)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"dp_replicate": 2, "dp_shard": 2}, {"tp": 2}),
        ({"tp": 2}, {"dp_shard": 4}),
        ({"tp": 2}, {"dp_replicate": 2, "tp": 2}),
    ],
)
def test_there_and_back_is_as_if_never_moved(
    gloo2: Any, gloo4: Any, first: Sizes, second: Sizes
) -> None:
    """Through another mesh of another size and back: the next step is the same, bit for bit."""

    def on(sizes: Sizes) -> Any:
        return gloo2 if math.prod(sizes.values()) == 2 else gloo4

    with tempfile.TemporaryDirectory() as a, tempfile.TemporaryDirectory() as b:
        expected = on(first)(begin, a, first)[0]
        there = on(second)(go_on, a, second, b)[0]
        continued = on(second)(go_on, a, second, "")[0]
        back = on(first)(go_on, b, first, "")[0]
    assert not all(torch.equal(there[key], expected[key]) for key in expected)
    for key, value in expected.items():
        assert torch.equal(back[key], value), key
        torch.testing.assert_close(continued[key], value, rtol=1e-5, atol=1e-6)
