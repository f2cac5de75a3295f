"""Other ways to call a model: functional_call, vmap, checkpointing, frames that Dynamo skips."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from scenarios.job import WIDTH, Job, Net


def functional(job: Job) -> None:
    """`functional_call` with plain tensors and with values made of the parameters, of the model
    and of the compiled one."""
    net, compiled = job.pair()
    job.backward(compiled)
    net.zero_grad()
    x, y = job.rows(1)
    torch.manual_seed(2)
    plain = {name: torch.randn(p.shape) * 0.1 for name, p in net.named_parameters()}
    prefix = "_orig_mod." if job.sharded else ""
    for name, called, start in (("model", net, ""), ("compiled", compiled, prefix)):
        given = {start + key: value for key, value in plain.items()}
        out = functional_call(called, given, (x,))
        job.record(f"{name}, plain", job.everyone(F.mse_loss(out, y)))
        made = {start + key: p * 0.9 for key, p in net.named_parameters()}
        loss = F.mse_loss(functional_call(called, made, (x,)), y)
        loss.backward()
        job.record(f"{name}, made", job.everyone(loss))
        job.record_model(net, name, gradients=True)
        net.zero_grad()
    job.backward(compiled, 2)
    job.record_model(net, gradients=True)


def stateless(job: Job) -> None:
    """`torch.nn.utils.stateless`, and one step of MAML: an inner update, differentiated through."""
    net, compiled = job.pair()
    job.backward(compiled)
    net.zero_grad()
    x, y = job.rows(1)
    names = [name for name, _ in net.named_parameters()]
    inner = F.mse_loss(net(x), y)
    grads = torch.autograd.grad(inner, [*net.parameters()], create_graph=True)
    fast = {n: p - 0.1 * g for n, p, g in zip(names, net.parameters(), grads)}
    outer = F.mse_loss(functional_call(net, fast, (x,)), y)
    outer.backward()
    job.record("outer", job.everyone(outer))
    job.record_model(net, gradients=True)


@torch.compiler.disable
def clamped(weight: torch.Tensor) -> None:
    """A write outside of the graph."""
    with torch.no_grad():
        weight.clamp_(-0.05, 0.05)


class Clamping(nn.Module):
    """Hands a weight to code outside of its graph."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.last = inner, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        clamped(self.last.weight)
        out: torch.Tensor = self.last(y)
        return out


def written_outside(job: Job) -> None:
    """A weight handed to a disabled function that writes to it: the write lands or is refused."""
    job.refusable = True
    model = Clamping(job.net())
    compiled = job.compile(model)
    for step in range(2):
        job.backward(compiled, step)
    job.record_model(model, gradients=True)


class PerSample(nn.Module):
    """Gradients of each sample inside the model, by vmap(grad(functional_call))."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.field = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = dict(self.field.named_parameters())

        def energy(one: torch.Tensor) -> torch.Tensor:
            return functional_call(self.field, values, (one,)).sum()

        return -vmap(grad(energy))(x)


def per_sample(job: Job) -> None:
    """A force field whose output is a gradient with respect to its input."""
    net = PerSample()
    compiled = job.compile(net)
    for step in range(2):
        job.train(compiled, torch.optim.SGD(net.parameters(), lr=0.1), [step])
    job.record_model(net)


class Checkpointed(nn.Module):
    """Blocks that are computed again in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.reentrant = reentrant
        self.lift = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lift(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def checkpointed(job: Job) -> None:
    """Gradient checkpointing of both kinds."""
    for reentrant in (False, True):
        net = Checkpointed(reentrant)
        compiled = job.compile(net)
        job.train(compiled, torch.optim.SGD(net.parameters(), lr=0.1), 2)
        job.record_model(net, f"reentrant {reentrant}")


class Spectral(nn.Module):
    """A Fourier layer: complex weights, of which slices are assigned into a complex output."""

    def __init__(self, modes: int = 4, stride: int = 1) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.modes, self.stride = modes, stride
        self.lift = nn.Linear(WIDTH, 8 * WIDTH)
        self.weight = nn.Parameter(torch.randn(8, 8, modes, dtype=torch.cfloat) * 0.1)
        self.drop = nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.lift(x).view(-1, 8, WIDTH)
        spectrum = torch.fft.rfft(h)
        out = torch.zeros_like(spectrum)
        part = spectrum[..., : self.modes]
        out[..., : self.modes * self.stride : self.stride] = torch.einsum(
            "bim,iom->bom", part, self.weight
        )
        y = torch.fft.irfft(out, n=WIDTH) + h
        result: torch.Tensor = self.drop(F.gelu(y).flatten(1))
        return result


def spectral(job: Job) -> None:
    """A Fourier neural operator's layer, and one that assigns every other mode."""
    for stride in (1, 2):
        net = Spectral(stride=stride)
        compiled = job.compile(net)
        job.train(compiled, torch.optim.SGD(net.parameters(), lr=0.1), 2)
        for name, parameter in net.named_parameters():
            value = job.whole(parameter.detach())
            real = torch.view_as_real(value) if value.is_complex() else value
            job.record(f"{stride} {name}", real)


class Mixture(nn.Module):
    """Experts chosen with torch.where in a loop, which Dynamo does not trace."""

    def __init__(self, how: str = "where") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.how = how
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, self.how)(x)  # type: ignore[no-any-return]

    def where(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        best = weights.argmax(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            (rows,) = torch.where(best == i)
            out[rows] += weights[rows, i, None] * expert(x[rows])
        return out

    @torch._dynamo.disable
    def disabled(self, x: torch.Tensor) -> torch.Tensor:
        return self.where(x)

    def generated(self, x: torch.Tensor) -> torch.Tensor:
        def parts() -> Iterator[torch.Tensor]:
            weights = self.gate(x).softmax(-1)
            for i, expert in enumerate(self.experts):
                print(end="")
                yield weights[:, i, None] * expert(x)

        return sum(parts())  # type: ignore[return-value]

    def in_a_context(self, x: torch.Tensor) -> torch.Tensor:
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: None)
            try:
                return self.where(x)
            finally:
                self.seen = float(x.detach().sum())


def module_compiled(job: Job, net: nn.Module) -> Any:
    """The model, compiled in place."""
    if job.sharded:
        net.compile(backend="autoshard", options=job.options())
    return net


def function_compiled(job: Job, net: nn.Module) -> Any:
    """A compiled function that calls the model."""
    return job.compile(lambda x: net(x))


def mixture(how: str, compiled_by: Callable[[Job, nn.Module], Any] = Job.compile) -> Any:
    """A scenario of a model whose frame Dynamo skips in one of several ways."""

    def scenario(job: Job) -> None:
        net = Mixture(how)
        compiled = compiled_by(job, net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            job.backward(compiled, step)
            # an expert that no row of a rank chose has no gradient there
            grads = {n: p.grad for n, p in net.named_parameters()}
            zero = {n: torch.zeros(p.shape) for n, p in net.named_parameters()}
            job.record(f"{step}", {n: zero[n] if g is None else g for n, g in grads.items()})
            optimizer.step()
        job.record_model(net)

    return scenario


@torch.compiler.disable
def halved(module: Any) -> torch.Tensor:
    """What eager code makes of a parameter."""
    return module.weight * 0.5  # type: ignore[no-any-return]


class Scaled(Net):
    """A weight that is made of a parameter in one graph, or by eager code, and read in the next."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.up.weight * 0.5 if self.how == "traced" else halved(self.up)
        torch._dynamo.graph_break()
        y = F.gelu(F.linear(x, weight, self.up.bias))
        return self.down(self.norm(y)) * self.logit_scale.exp()  # type: ignore[no-any-return]


def made_between_graphs(job: Job) -> None:
    """A scaled weight between two graphs of a forward."""
    for how in ("traced", "disabled"):
        torch.manual_seed(1)
        net = Scaled(how)
        job.train(job.compile(net), torch.optim.SGD(net.parameters(), lr=0.1))
        job.record_model(net, how)


class Adaptive(nn.Module):
    """A head whose weights of a cluster of words are read where the batch has one of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(24, WIDTH)
        self.head = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, 24, [4, 12])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.head(self.embed(ids).flatten(0, 1), ids.flatten()).loss
        return loss


def adaptive_softmax(job: Job) -> None:
    """Words of which a data-parallel rank has the frequent ones only, another the others."""
    net = Adaptive()
    compiled = job.compile(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(2):
        ids = torch.arange(24).add(step).clamp(max=23).view(4, 6).chunk(job.ranks)[job.rank]
        optimizer.zero_grad()
        loss = compiled(ids)
        job.record_loss(loss, step)
        loss.backward()
        optimizer.step()
    job.record_model(net)


def whole_model_disabled(job: Job) -> None:
    """A model whose `forward` itself is disabled: the backend is never called."""

    class Disabled(Mixture):
        @torch._dynamo.disable
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.where(x)

    job.refusable = True
    net = Disabled()
    compiled = job.compile(net)
    job.train(compiled, torch.optim.SGD(net.parameters(), lr=0.1), 2)
    job.record_model(net)
