"""Weights of a model that trains on one mesh, in models on others: processes, real programs."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard.errors import AutoshardError
from models import CASES
from side_by_side import whole

Sizes = dict[str, int]


def compiled(model: nn.Module, mesh: Any) -> Any:
    options = {"mesh": mesh, "inner": "aot_eager"}
    return torch.compile(model, backend="autoshard", options=options)


def step(model: nn.Module, mesh: Any, name: str = "llama") -> Any:
    """The compiled model after a step of AdamW."""
    case, optimizer = CASES[name], torch.optim.AdamW(model.parameters(), lr=1e-2)
    sharded = compiled(model, mesh)
    case.loss(sharded, case.make_batch(0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return sharded


def generating(mesh: Any, name: str = "llama") -> Any:
    """A model of other weights that has answered once."""
    torch.manual_seed(99)
    model = CASES[name].build().eval()
    sharded = compiled(model, mesh)
    with torch.no_grad():
        CASES[name].loss(sharded, CASES[name].make_batch(1))
    return sharded


def in_the_same_processes(folder: str) -> None:
    from transformers import LlamaForCausalLM

    ids = CASES["llama"].make_batch(2)["input_ids"]
    trainer = step(CASES["llama"].make_model(), {"dp_shard": 2})
    generator = generating({"tp": 2})
    kept = list(generator.parameters())
    report = autoshard.weights.transfer(trainer, generator, version=1).wait()
    assert report.version == 1 and report.received > 0 and report.copied > 0
    assert all(a is b for a, b in zip(kept, generator.parameters(), strict=True))
    for (name, a), b in zip(trainer.named_parameters(), generator.parameters(), strict=True):
        assert torch.equal(whole(a.detach()), whole(b.detach())), name

    autoshard.export.huggingface(trainer, Path(folder) / "out")
    exported = LlamaForCausalLM.from_pretrained(Path(folder) / "out").eval()
    plain = CASES["llama"].build().eval()
    autoshard.weights.transfer(trainer, plain).wait()
    with torch.no_grad():
        assert torch.equal(plain(ids).logits, exported(ids).logits)
        sharded = compiled(exported, {"tp": 2})
        assert torch.equal(generator(ids).logits, sharded(ids).logits)


def test_a_trainer_s_weights_are_those_of_its_exported_directory(gloo2: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        gloo2(in_the_same_processes, folder)


def between_processes(trains: str, generates: str) -> list[int]:
    """Ranks 0 and 1 train, 2 and 3 generate; a changed model between two updates is refused."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from autoshard.runtime.mesh import start_world

    start_world("cpu")
    rank = dist.get_rank()
    meshes = [
        DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=(axis,))
        for ranks, axis in (([0, 1], trains), ([2, 3], generates or "tp"))
    ]
    sums: list[int] = []
    if rank < 2:
        trainer = step(CASES["llama"].make_model(), meshes[0])
        for version in (1, 2):
            report = autoshard.weights.send(trainer, version=version).wait()
            sums.append(report.sent)
        changed = nn.Linear(3, 3)
        with pytest.raises(AutoshardError, match="tensors are not sent"):
            autoshard.weights.send(changed)
        wholes = {n: whole(p.detach()) for n, p in trainer._orig_mod.named_parameters()}
    else:
        generator = generating(meshes[1]) if generates else CASES["llama"].build()
        for version in (1, 2):
            report = autoshard.weights.receive(generator).wait()
            assert report.version == version
            sums.append(report.received)
        inner = getattr(generator, "_orig_mod", generator)
        wholes = {n: whole(p.detach()) for n, p in inner.named_parameters()}
        with pytest.raises(AutoshardError, match="tensors are not sent"):
            autoshard.weights.receive(generator)
        again = {n: whole(p.detach()) for n, p in inner.named_parameters()}
        assert all(torch.equal(wholes[n], again[n]) for n in wholes)
    given: list[Any] = [None] * 4
    dist.all_gather_object(given, wholes)
    assert all(torch.equal(given[0][n], other[n]) for other in given for n in wholes)
    return sums


@pytest.mark.parametrize(
    ("trains", "generates"), [("dp_shard", "tp"), ("tp", "dp_shard"), ("dp_shard", "")]
)
def test_from_two_processes_to_two_others(gloo4: Any, trains: str, generates: str) -> None:
    sums = gloo4(between_processes, trains, generates)
    size = sum(p.nbytes for p in CASES["llama"].build().parameters())
    assert sums[0][0] + sums[1][0] == sums[2][0] + sums[3][0]
    if not generates:
        assert sums[2] == sums[3] == [size, size]
    else:
        assert size <= sums[2][0] + sums[3][0] <= 1.1 * size
