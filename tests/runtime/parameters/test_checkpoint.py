"""Saving, loading and copying models whose parameters are shards."""

from __future__ import annotations

import copy
import io
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from autoshard.runtime.parameters.shard import shard_parameters
from gloo_pool import GlooPool
from sharded import (
    Mixed,
    adamw,
    batch,
    by_dim,
    loss_of,
    sharded_mixed,
    tp,
)


def trained_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    loss_of(model, batch(0)).backward()
    optimizer = adamw(p for p in model.parameters() if p.grad is not None)
    optimizer.step()
    return optimizer


def run_checkpoints(folder: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    serial = Mixed().eval()
    keys = list(serial.state_dict())
    model = sharded_mixed(1)
    assert list(model.state_dict()) == keys
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())
    whole_state = {name: value.full_tensor() for name, value in model.state_dict().items()}

    optimizer = trained_optimizer(model)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)

    other = sharded_mixed(2)
    other_optimizer = trained_optimizer(other)
    weights, moments = get_state_dict(other, other_optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(other, other_optimizer, model_state_dict=weights, optim_state_dict=moments)
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p.to_local(), q.to_local()), name
        if p.grad is not None:
            mine, theirs = optimizer.state[p]["exp_avg"], other_optimizer.state[q]["exp_avg"]
            assert torch.equal(mine.to_local(), theirs.to_local()), name

    other.load_state_dict(whole_state)  # whole tensors
    model.load_state_dict(other.state_dict())  # DTensors
    serial.load_state_dict(whole_state)
    torch.testing.assert_close(model(batch(0)), serial(batch(0)))
    other.load_state_dict(model.state_dict(), assign=True)
    torch.testing.assert_close(other(batch(0)), serial(batch(0)))
    with pytest.raises(RuntimeError, match="size mismatch for scale"):
        model.load_state_dict({**whole_state, "scale": torch.zeros(4, 8)})

    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)  # a serial model of the user's own classes
    assert type(loaded.head) is nn.Linear and type(loaded.head.weight) is nn.Parameter
    again = copy.deepcopy(model)
    assert type(again.head) is type(model.head) and isinstance(again.head.weight, DTensor)
    for copied in (loaded, again):
        assert copied.head._parameters["weight"] is copied.embed._parameters["weight"]
        torch.testing.assert_close(copied(batch(0)), serial(batch(0)))
    rnn = copy.deepcopy(nn.LSTM(4, 4))
    shard_parameters({p: by_dim(p) for p in rnn.parameters()}, tp(), broadcast=True)
    x = torch.randn(2, 4)
    torch.testing.assert_close(copy.deepcopy(rnn)(x)[0], rnn(x)[0])


def test_checkpoints_and_copies(gloo2: GlooPool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        gloo2(run_checkpoints, folder)


def run_torn(folder: str) -> list[str]:
    """What is said of a checkpoint of which the last files are missing, and of one cut short; the
    model keeps its values."""
    import torch.distributed.checkpoint as dcp

    model = sharded_mixed(1)
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/whole")
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.copytree(f"{folder}/whole", f"{folder}/early")
        Path(folder, "early", ".metadata").unlink()  # written last, when all parts are there
        shutil.copytree(f"{folder}/whole", f"{folder}/short")
        for part in Path(folder, "short").glob("*.distcp"):
            part.write_bytes(part.read_bytes()[:100])
    dist.barrier()
    other = sharded_mixed(2)
    before = [p.to_local().clone() for p in other.parameters()]
    said = []
    for name in ("early", "short"):
        state = {"model": {key: value.clone() for key, value in other.state_dict().items()}}
        try:
            dcp.load(state, checkpoint_id=f"{folder}/{name}")
        except CheckpointException as error:
            said.append(name if str(error) else "")
    assert all(torch.equal(p.to_local(), b) for p, b in zip(other.parameters(), before))
    return said


def test_a_checkpoint_whose_writing_was_interrupted(gloo2: GlooPool, tmp_path: Path) -> None:
    assert gloo2(run_torn, str(tmp_path)) == [["early", "short"]] * 2
