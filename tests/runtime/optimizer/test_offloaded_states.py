"""States on the host beside states on the device, on a mesh: the same parts, the same files."""

from __future__ import annotations

import contextlib
import tempfile
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from joined_batch import Sizes
from token_net import Net, batch

MIXED = {"param": "bfloat16", "reduce": "float32"}


def trained(
    sizes: Sizes, host: bool, master: Any = None, precision: Any = None
) -> tuple[nn.Module, Any, Any]:
    """A model after two steps, the first of two microbatches; its optimizer; what steps again."""
    from autoshard.runtime.mesh import data_coordinate, init_mesh

    mesh = init_mesh(sizes, "cpu")
    rank, ranks = data_coordinate(mesh), mesh.batches
    model = Net() if master is None else Net().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-3, lr=1e-2)
    if host:
        optimizer = autoshard.offload_optimizer(optimizer, master_dtype=master)
    options: Any = {"mesh": sizes, "inner": "aot_eager", "precision": precision}
    compiled = torch.compile(model, backend="autoshard", options=options)

    def step(*numbers: int) -> None:
        for number in numbers:
            waits = number != numbers[-1]
            with autoshard.no_sync(compiled) if waits else contextlib.nullcontext():
                compiled(batch(number).chunk(ranks)[rank]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()

    step(0, 1)
    step(2)
    return model, optimizer, step


def parts(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """The parts of parameters and states."""
    found = [p.detach().to_local() for p in model.parameters()]  # type: ignore[operator]
    for p in model.parameters():
        state = optimizer.state.get(p, {})
        assert all(x.placements == p.placements for k, x in state.items() if k != "step")  # type: ignore[attr-defined]
        found += [x if k == "step" else x.to_local() for k, x in state.items()]
    return found


def equal(one: Any, other: Any) -> bool:
    return all(map(torch.equal, parts(*one[:2]), parts(*other[:2])))


def moved(first: Sizes, second: Sizes, folder: str) -> None:
    """From the host to the device and back, through files of torch.distributed.checkpoint."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    precision = MIXED if first == second else None
    host, device = (trained(first, host, precision=precision) for host in (True, False))
    assert equal(host, device)
    want, got = (autoshard.full_state_dict(one[1], rank0_only=False) for one in (host, device))
    for state, other in zip(want["state"].values(), got["state"].values(), strict=True):
        assert all(map(torch.equal, state.values(), other.values()))
    for source, target in ((host, False), (device, True)):
        weights, moments = get_state_dict(source[0], source[1])
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/{target}")
        other = trained(second, target, precision=precision)
        other[2](5)
        weights, moments = get_state_dict(other[0], other[1])
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/{target}")
        set_state_dict(other[0], other[1], model_state_dict=weights, optim_state_dict=moments)
        if first == second:
            assert equal(source, other)
        source[2](3)
        other[2](3)
        for p, q in zip(source[0].parameters(), other[0].parameters(), strict=True):
            assert (p.full_tensor() - q.full_tensor()).abs().max() < 1e-5  # type: ignore[operator]


def copies_in_float32(sizes: Sizes, folder: str) -> None:
    """With copies in float32: their state goes on where it was, through files."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    first, second = (trained(sizes, True, torch.float32) for _ in range(2))
    weights, moments = get_state_dict(first[0], first[1])
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    second[2](5)
    assert not equal(first, second)
    weights, moments = get_state_dict(second[0], second[1])
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(second[0], second[1], model_state_dict=weights, optim_state_dict=moments)
    assert equal(first, second)
    p: Any = first[0].up.weight
    state = first[1].state[p]
    assert p.dtype == torch.bfloat16 and state["master"].dtype == torch.float32
    assert torch.equal(state["master"].to_local().bfloat16(), p.to_local())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"dp_shard": 2}, {"dp_shard": 2}),
        ({"tp": 2}, {"dp_shard": 2}),
        ({"pp": 2}, {"dp_shard": 2}),
    ],
)
def test_files_move_between_host_and_device(gloo2: Any, first: Sizes, second: Sizes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        gloo2(moved, first, second, folder)


def test_copies_in_float32_on_a_mesh(gloo2: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        gloo2(copies_in_float32, {"dp_shard": 2}, folder)
