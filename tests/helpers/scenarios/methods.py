"""Models that are used by other methods than forward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from scenarios.job import WIDTH, Job

VOCABULARY = 11


class Agent(nn.Module):
    """An actor and a critic, as cleanrl has them: forward is never called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH), nn.Tanh())
        self.actor, self.critic = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 1)
        self.log_std = nn.Parameter(torch.full((4,), -0.5))
        self.register_buffer("seen", torch.zeros(()))

    def get_value(self, x: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = self.critic(self.body(x))
        return value

    def get_action_and_value(
        self, x: torch.Tensor, action: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        hidden = self.body(x)
        self.seen += 1
        mean = self.actor(hidden)
        action = mean.detach() if action is None else action
        log_prob = -(((action - mean) / self.std) ** 2) / 2 - self.log_std
        return action, log_prob.sum(-1), {"value": self.critic(hidden), "mean": mean}

    @property
    def std(self) -> torch.Tensor:
        return self.log_std.exp()

    def entropy(self) -> torch.Tensor:
        return self.log_std.sum()

    @torch.no_grad()
    def act(self, x: torch.Tensor) -> torch.Tensor:
        mean: torch.Tensor = self.actor(self.body(x))
        return mean

    @staticmethod
    def scale(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @classmethod
    def width(cls) -> int:
        return WIDTH


def steps(job: Job, net: nn.Module, loss: Callable[[int], torch.Tensor], count: int = 3) -> None:
    """Three steps of AdamW; losses, gradients and parameters are recorded."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3)
    for step in range(count):
        optimizer.zero_grad()
        value = loss(step)
        job.record_loss(value, step)
        value.backward()
        job.record_model(net, f"{step}", gradients=True)
        optimizer.step()
    job.record_model(net, "trained")


def actor_critic(job: Job) -> None:
    """A value, an action with its probability; a regularizer of parameters alone; no forward."""
    net = Agent()
    agent = job.compile(net)
    assert agent.width() == WIDTH
    with contextlib.suppress(AttributeError):
        assert agent.get_value.__self__ is net

    def loss(step: int) -> torch.Tensor:
        x, y = job.rows(step)
        agent.eval()
        job.record(f"{step} acts", job.everyone(agent.act(x).mean()))
        agent.train()
        _, log_prob, more = agent.get_action_and_value(x, agent.scale(y[:, :4]))
        value = agent.get_value(y)
        mean = (more["value"] - value).square().mean() + more["mean"].square().mean()
        return mean - 0.1 * log_prob.mean() - 0.01 * agent.entropy() + 0.01 * agent.std.sum()

    steps(job, net, loss)
    job.is_stored(net, "body.0.weight")


def regularizer_first(job: Job) -> None:
    """What reads parameters and no data comes before the first compiled call, and alone."""
    net = Agent()
    agent = job.compile(net)
    steps(job, net, lambda step: agent.entropy().square() + agent.std.sum(), count=1)


class Base(nn.Module):
    """What the autoencoder below inherits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.lift = nn.Linear(WIDTH, 33)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.lift(x))


class Autoencoder(Base):
    """`encode` by way of `super()`, `decode`, and a loss that calls `self.forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.widen = nn.Linear(33, 8), nn.Linear(8, WIDTH)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        code: torch.Tensor = self.narrow(super().encode(x))
        return code

    def decode(self, code: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.widen(code)
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x))

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.mse_loss(self.forward(batch["x"]), batch["y"])


def encoder_decoder(job: Job) -> None:
    """`decode(encode(x))` in two calls, then the loss in one."""
    net = Autoencoder()
    model = job.compile(net)

    def loss(step: int) -> torch.Tensor:
        x, y = job.rows(step)
        if step == 2:
            whole: torch.Tensor = model.loss({"x": x, "y": y})
            return whole
        return F.mse_loss(model.decode(model.encode(x)), y)

    steps(job, net, loss)
    job.is_stored(net, "lift.weight")


def whole_loss(job: Job) -> None:
    """A method that is one graph, from the batch to the loss."""
    net = Autoencoder()
    model = job.compile(net)
    steps(job, net, lambda step: model.loss(dict(zip("xy", job.rows(step)))))
    job.is_stored(net, "lift.weight")


class Module(Autoencoder):
    """A module of Lightning's kind: `training_step` logs, which no graph can."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[float] = []

    def log(self, value: torch.Tensor) -> None:
        self.logged.append(float(value.detach()))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], number: int) -> torch.Tensor:
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.log(loss)
        return loss + 0.1 * self.encode(x).square().mean() * (number + 1)

    def configure_optimizers(self, rate: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=rate)


def training_step(job: Job) -> None:
    """A step of the module's own, and its own optimizer."""
    net = Module()
    model = job.compile(net)
    optimizer = model.configure_optimizers(0.1)
    for step in range(3):
        loss = model.training_step(job.rows(step), step)
        job.record_loss(loss, step)
        loss.backward()
        job.record_model(net, f"{step}", gradients=True)
        optimizer.step(), optimizer.zero_grad()
        job.record(f"logged {step}", job.everyone(torch.tensor(net.logged[-1])))
    job.record_model(net)


class Untraced(Autoencoder):
    """A method of which Dynamo sees nothing, and one that it traces in parts."""

    @torch.compiler.disable
    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(x)

    def broken(self, x: torch.Tensor) -> torch.Tensor:
        code = self.encode(x)
        torch._dynamo.graph_break()
        return self.decode(code)


def untraced(name: str) -> Callable[[Job], None]:
    """A scenario of a method that Dynamo leaves to eager code."""

    def scenario(job: Job) -> None:
        net = Untraced()
        model = job.compile(net)
        steps(job, net, lambda step: getattr(model, name)(job.rows(step)[0]).square().mean())

    return scenario


class Writer(nn.Module):
    """A language model with a `generate` of its own, as nanoGPT's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.mix, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.traced = 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.table(ids)
        sums = hidden.cumsum(1) / torch.arange(1, ids.shape[1] + 1)[:, None]
        logits: torch.Tensor = self.head(F.gelu(self.mix(sums)))
        return logits

    @torch.no_grad()
    def generate(self, ids: torch.Tensor, count: int) -> torch.Tensor:
        for _ in range(count):
            self.traced += torch.compiler.is_compiling()
            logits = self(ids)[:, -1]
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
        return ids

    def rollout(self, length: int) -> torch.Tensor:
        return self.generate(torch.zeros(2, 1, dtype=torch.long), length)


def generation(job: Job) -> None:
    """Tokens before the first step, between steps, and from a method that is given no tensor."""
    net = Writer()
    model = job.compile(net)

    def loss(step: int) -> torch.Tensor:
        ids = job.ids(step, VOCABULARY)
        with torch.no_grad():
            everyone = torch.arange(4).view(2, 2) + step
        job.record(f"{step} tokens", model.generate(everyone, 5))
        job.record(f"{step} rollout", model.rollout(3))
        return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    steps(job, net, loss)
    assert not net.traced, "the loop over tokens was unrolled"
    job.is_stored(net, "table.weight")


class Recurrent(nn.Module):
    """A cell that a method calls for each row in time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.cell, self.out = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def advance(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.cell(torch.cat([x, state], -1)))

    def unroll(self, x: torch.Tensor, length: int) -> torch.Tensor:
        state = torch.zeros_like(x)
        for _ in range(length):
            state = self.advance(x, state)
        out: torch.Tensor = self.out(state)
        return out


def recurrence(job: Job) -> None:
    """A loop over time that is trained through."""
    net = Recurrent()
    model = job.compile(net)

    def loss(step: int) -> torch.Tensor:
        x, y = job.rows(step)
        return F.mse_loss(model.unroll(x, 3), y)

    steps(job, net, loss)
