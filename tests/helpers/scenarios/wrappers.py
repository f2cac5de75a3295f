"""Other parallel wrappers around the compiled model or inside of it: right, or refused by name."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from scenarios.job import WIDTH, Job


def _started(job: Job) -> bool:
    if job.sharded and not dist.is_initialized():
        dist.init_process_group("gloo")
    return job.sharded


def ddp_around(job: Job) -> None:
    """DistributedDataParallel of the compiled model, which it cannot reduce: refused."""
    job.refusable = True
    net, compiled = job.pair()
    model: Any = DistributedDataParallel(compiled) if _started(job) else net
    job.train(model, torch.optim.SGD(net.parameters(), lr=0.1), 2)
    assert not job.sharded, "trained in DistributedDataParallel"
    job.record_model(net)


def ddp_inside(job: Job) -> None:
    """The compiled model wraps DistributedDataParallel, whose forward Dynamo skips: refused."""
    job.refusable = True
    net = job.net()
    model = DistributedDataParallel(net) if _started(job) else net
    compiled = job.compile(model)
    job.train(compiled, torch.optim.SGD(net.parameters(), lr=0.1), 2)
    assert not job.sharded, "trained in DistributedDataParallel"
    job.record_model(net)


def ddp_of_a_stored_model(job: Job) -> None:
    """DistributedDataParallel of a model that a first call has stored."""
    job.refusable = True
    net, compiled = job.pair()
    job.loss(compiled)
    model: Any = DistributedDataParallel(net) if _started(job) else net
    job.train(model, torch.optim.SGD(net.parameters(), lr=0.1), 2)
    job.record_model(net)


def fully_sharded(job: Job) -> None:
    """`fully_shard` of layers and of the model, which is then compiled."""
    job.refusable = True
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
    if _started(job):
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(net[0], mesh=mesh)
        fully_shard(net, mesh=mesh)
    compiled = job.compile(net)
    job.train(compiled, torch.optim.SGD(net.parameters(), lr=0.1), 2)
    job.record_model(net)


def fully_shard_of_a_stored_model(job: Job) -> None:
    """`fully_shard` of a model that a first call has stored."""
    job.refusable = True
    net, compiled = job.pair()
    job.loss(compiled)
    if _started(job):
        fully_shard(net, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    job.train(compiled, torch.optim.SGD(net.parameters(), lr=0.1), 2)
    job.record_model(net)


def own_hook(job: Job) -> None:
    """A hook on each parameter that takes the mean over the ranks by hand, as a script written for
    one's own data parallelism does: what a mesh has averaged stays as it is."""
    net, compiled = job.pair()

    def average(grad: torch.Tensor) -> torch.Tensor:
        if not job.sharded:
            return grad
        whole = job.whole(grad)
        dist.all_reduce(whole)
        return whole / dist.get_world_size()

    for p in net.parameters():
        p.register_hook(average)
    job.train(compiled, torch.optim.SGD(net.parameters(), lr=0.1), 2)
    job.record_model(net)


def autocast(job: Job) -> None:
    """Autocast to bf16 around the call, with fp32 weights."""
    net, compiled = job.pair()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = job.loss(compiled, step)
        loss.backward()
        optimizer.step()
        job.record(f"{step} dtypes", [str(p.grad.dtype) for p in net.parameters()])  # type: ignore[union-attr]
        job.record(f"{step} loss", round(float(job.everyone(loss)), 1))


def data_parallel_threads(job: Job) -> None:
    """`nn.DataParallel` on one device, which calls the module as it is."""
    net, compiled = job.pair()
    model = nn.DataParallel(compiled)
    job.train(model, torch.optim.SGD(net.parameters(), lr=0.1), 2)
    job.record_model(net)
