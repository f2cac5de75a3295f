"""Models of which a part runs compiled, or nothing: right, or an error of the first step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F

from autoshard.errors import AutoshardError
from scenarios.job import DATA_AXES, WIDTH, Job
from scenarios.methods import Autoencoder, steps


@contextlib.contextmanager
def refused(job: Job, *words: str) -> Iterator[None]:
    """An error of the first step where ranks have batches of their own; elsewhere nothing."""
    if not (job.sharded and set(DATA_AXES) & set(job.sizes or {})):
        yield
        return
    try:
        yield
    except AutoshardError as error:
        missing = [w for w in ("nothing reduced", __file__, *words) if w not in str(error)]
        assert not missing, f"{missing} not in {error}"
    else:
        raise AssertionError("the ranks train apart, and nothing says so")


def uncompiled(job: Job) -> None:
    """The model itself is called, not what torch.compile returned: an error of the first step."""
    net, compiled = job.pair()
    (job.loss(net) + compiled.up(job.rows(0)[0]).square().mean()).backward()
    with refused(job, "up.weight", "compiled.method"):
        torch.optim.SGD(net.parameters(), lr=0.0).step()
    lbfgs = torch.optim.LBFGS(net.parameters(), lr=0.0, max_iter=1)

    def closure() -> torch.Tensor:
        lbfgs.zero_grad()
        loss = job.loss(net)
        loss.backward()
        return loss

    lbfgs.zero_grad()
    with refused(job, "LBFGS", "up.weight"):
        lbfgs.step(closure)
    net.zero_grad()
    job.train(compiled, torch.optim.SGD(net.parameters(), lr=0.1), 2)


def unreached(job: Job) -> None:
    """torch.compile that is disabled; a method of a model that `model.compile()` compiles."""
    net = Autoencoder()
    if job.sharded:
        made = torch.compile(net, backend="autoshard", options=job.options(), disable=True)
        assert made is net
    job.loss(net).backward()
    with refused(job, "disable=True"):
        torch.optim.SGD(net.parameters(), lr=0.0).step()
    net = Autoencoder()
    if job.sharded:
        net.compile(backend="autoshard", options=job.options())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    job.loss(lambda x: net.decode(net.encode(x))).backward()
    with refused(job, "model.compile()"):
        optimizer.step()
    optimizer.zero_grad()
    job.loss(net)
    steps(job, net, lambda step: job.loss(lambda x: net.decode(net.encode(x)), step))


def parts(job: Job) -> None:
    """Only the encoder is compiled; the rest of its model runs as it is, before it and after it."""
    net = Autoencoder()
    widen = net.widen
    net.lift = job.compile(net.lift)

    def loss(step: int) -> torch.Tensor:
        x, y = job.rows(step)
        early = net.widen(x[:, :8]).square().mean() if step == 0 else 0.0
        return F.mse_loss(net(x), y) + early

    steps(job, net, loss)
    assert widen is net.widen


def part_of_the_compiled(job: Job) -> None:
    """A layer of the compiled module is called by itself."""
    net = Autoencoder()
    model = job.compile(net)

    def loss(step: int) -> torch.Tensor:
        x, y = job.rows(step)
        return F.mse_loss(model(x), y) + model.widen(model.encode(x)).square().mean()

    steps(job, net, loss)


def beside(job: Job) -> None:
    """A head that is no part of the compiled model, in the same optimizer."""
    net, compiled = job.pair()
    head = nn.Linear(WIDTH, 1)
    optimizer = torch.optim.SGD([*net.parameters(), *head.parameters()], lr=0.0)
    (job.loss(compiled) + head(job.rows(0)[0]).square().mean()).backward()
    with refused(job, "weight", "bias", "optimizer of its own"):
        optimizer.step()
    head.zero_grad()
    job.backward(compiled, 1)


def gradients_before(job: Job) -> None:
    """A microbatch through the model itself, before the first compiled call, counts."""
    net, compiled = job.pair()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step, model in enumerate((net, compiled)):
        job.backward(model, step)
    job.record_model(net, gradients=True)
    optimizer.step()
    job.record_model(net)
