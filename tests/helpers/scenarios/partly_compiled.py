"""Models of which a part runs compiled, or nothing: right, or an error of the first step."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F

from autoshard.errors import AutoshardError
from scenarios.job import DATA_AXES, WIDTH, Job, Net
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


class Queued(Net):
    """A queue of keys, a buffer: forward reads a copy of it and writes it behind a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.randn(WIDTH, 12))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = super().forward(x)
        scores = query @ self.queue.clone().detach()
        at = int(self.at)
        with torch.no_grad():
            self.queue[:, at : at + len(x)] = query.t()
            self.at[0] = (at + len(x)) % 12
        return scores


def queue_of_keys(job: Job) -> None:
    """MoCo's queue: the copy that forward read is what backward reads."""
    torch.manual_seed(1)
    net = Queued()
    compiled = job.compile(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(4, WIDTH, generator=generator)  # the same keys on every rank
        optimizer.zero_grad()
        loss = compiled(x).logsumexp(1).mean()
        job.record_loss(loss, step)
        loss.backward()
        optimizer.step()
    job.record_model(net)


class Encoder(nn.Module):
    """Patches of an image, gated layers, and the direction of their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
            for _ in range(3)
        )
        self.head = nn.Linear(16, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = x + layer(x) * torch.sigmoid(x)
        return F.normalize(self.head(x.mean(1)), dim=1)


class Encoders(nn.Module):
    """An encoder beside a frozen copy, in one graph: kernels of both are fused across sums."""

    def __init__(self) -> None:
        super().__init__()
        self.query = Encoder()
        self.key = copy.deepcopy(self.query).requires_grad_(False)

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        query = self.query(one)
        with torch.no_grad():
            key = self.key(other)
        return (query * key).sum(1).mean()


def two_encoders(job: Job) -> None:
    """MoCo's encoders, which one rank's rows of two views go through."""
    torch.manual_seed(1)
    net = Encoders()
    compiled = job.compile(net)
    views = torch.randn(2, 8, 3, 16, 16).chunk(job.ranks, 1)[job.rank]
    loss = compiled(*views)
    job.record_loss(loss, 0)
    loss.backward()
    job.record_model(net, gradients=True)
