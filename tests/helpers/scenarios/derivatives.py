"""Derivatives with respect to stored parameters that are not one backward: second ones, those of
torch.func, those that `autograd.grad` is asked for in its several ways."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch.nn import functional as F

from autoshard.errors import AutoshardError
from scenarios.job import WIDTH, Job, Net


def _stored(job: Job) -> tuple[Net, Any]:
    """A model whose parameters are stored, and its compiled form."""
    net, compiled = job.pair()
    job.backward(compiled)
    net.zero_grad()
    return net, compiled


def _penalised(job: Job, net: Net, model: Any, when: str) -> None:
    """A loss with penalties on its own gradient, and its gradient."""
    loss = job.loss(model, 1)
    grads = torch.autograd.grad(loss, [*net.parameters()], create_graph=True)
    norm = torch.stack([g.norm() for g in grads]).norm()
    penalty = sum(g.square().sum() for g in grads) + 0.3 * norm
    (loss + penalty).backward()
    job.record(f"{when} penalty", penalty)
    job.record_model(net, when, gradients=True)
    net.zero_grad()


def gradient_penalties(job: Job) -> None:
    """Penalties on the gradient of the parameters, in both its forms, and of the input, in eager
    code; through the compiled graph they are refused."""
    net, compiled = _stored(job)
    _penalised(job, net, net, "grad")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of a cycle of references
        job.loss(net, 1).backward(create_graph=True)
    norm = sum((p.grad**2).sum() for p in net.parameters())  # type: ignore[operator]
    net.zero_grad()
    norm.backward()  # type: ignore[union-attr]
    job.record_model(net, "backward", gradients=True)
    net.zero_grad()
    x = job.rows(1)[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    (slope.norm(dim=1) - 1).square().mean().backward()
    job.record_model(net, "input", gradients=True)
    if job.sizes is not None:
        of = (
            "(create_graph=True) through a pipeline"
            if "pp" in job.sizes
            else "through a compiled graph"
        )
        for asked in (x, net.up.weight):
            try:
                loss = compiled(x).square().sum()
                (slope,) = torch.autograd.grad(loss, asked, create_graph=True)
                slope.square().sum().backward()
                raise AssertionError("a second derivative of a compiled graph was not refused")
            except AutoshardError as error:
                assert f"a second derivative {of}" in str(error), error


def hessian_products(job: Job) -> None:
    """Products with the Hessian in two ways, and a third derivative through one."""
    net, _ = _stored(job)
    parameters = [*net.parameters()]
    grads = torch.autograd.grad(job.loss(net, 1), parameters, create_graph=True)
    torch.manual_seed(5)
    vectors = [torch.randn(p.shape) for p in parameters]
    products = torch.autograd.grad(grads, parameters, vectors, retain_graph=True)
    job.record("by grad_outputs", list(products))
    dot = sum((g * v).sum() for g, v in zip(grads, vectors))
    products = torch.autograd.grad(dot, parameters, create_graph=True)  # type: ignore[arg-type]
    job.record("by a dot product", list(products))
    cubes = sum(p.pow(3).sum() for p in products)
    job.record("third", list(torch.autograd.grad(cubes, parameters)))  # type: ignore[arg-type]


def recorded_by_autograd(job: Job) -> None:
    """Penalties through a compiled model whose operators autograd records (inner="eager")."""
    net = job.net()
    compiled = job.compile(net, inner="eager")
    _penalised(job, net, compiled, "parameters")
    x = job.rows(1)[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(compiled(x).square().sum(), x, create_graph=True)
    (slope.norm(dim=1) - 1).square().mean().backward()
    job.record_model(net, "input", gradients=True)


def transforms(job: Job) -> None:
    """torch.func in eager code over a model whose parameters are stored: constants to it."""
    net, _ = _stored(job)
    x, y = job.rows(1)

    def forces(x: torch.Tensor) -> torch.Tensor:
        return vmap(grad(lambda one: net(one[None]).square().sum()))(x)  # type: ignore[no-any-return]

    F.mse_loss(forces(x), y).backward()
    job.record_model(net, "forces", gradients=True)
    found = {
        "jacrev": vmap(jacrev(net))(x),
        "jvp": jvp(net, (x,), (torch.ones_like(x),))[1],
        "vmap": vmap(net)(torch.stack([x, 2 * x])),
    }
    for name, value in found.items():
        job.record(name, job.everyone(value.square().sum()) * job.ranks)


class _Adapted(nn.Module):
    """A step on an inner loss in each forward (MAML; of rows that all ranks have), and a map over
    a parameter's rows."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("support", torch.linspace(-1.0, 1.0, 2 * WIDTH).view(2, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = dict(self.net.named_parameters())

        def inner(values: dict[str, torch.Tensor]) -> torch.Tensor:
            return functional_call(self.net, values, (self.support,)).square().mean()

        slopes = grad(inner)(own)
        adapted = {name: value - 0.1 * slopes[name] for name, value in own.items()}
        y: torch.Tensor = functional_call(self.net, adapted, (x,))
        return y + vmap(lambda row: row["up.bias"].square())({"up.bias": own["up.bias"]}).sum()


def transforms_in_a_graph(job: Job) -> None:
    """torch.func over the parameters themselves, in a forward that is compiled."""
    model = _Adapted(job.net())
    compiled = job.compile(model)
    job.train(compiled, torch.optim.SGD(model.parameters(), lr=0.1))
    job.is_stored(model, "net.up.weight")
    job.record_model(model)


def several_ways(job: Job) -> None:
    """retain_graph, allow_unused, inputs=, a second backward, grad in a forward hook; one batch of
    gradients is refused."""
    net, compiled = _stored(job)
    elsewhere = nn.Parameter(torch.ones(3))
    for name, model in (("eager", net), ("compiled", compiled)):
        loss = job.loss(model, 1)
        asked = [*net.parameters(), elsewhere]
        job.record(f"{name} unused", list(torch.autograd.grad(loss, asked, allow_unused=True)))
        with torch.autograd.graph.save_on_cpu():
            job.loss(model, 1).backward(inputs=[net.up.weight])
        job.record_model(net, f"{name} inputs", gradients=True)
        try:
            loss.backward()
        except RuntimeError as error:
            job.record(f"{name} again", "a second time" in str(error))
        if job.sharded:
            losses = model(job.rows(1)[0]).square().mean(0)
            try:
                torch.autograd.grad(
                    losses, net.up.weight, torch.eye(losses.numel()), is_grads_batched=True
                )
                raise AssertionError("a batch of gradients was not refused")
            except AutoshardError as error:
                assert "in one batch" in str(error), error
        net.zero_grad()
    loss = job.loss(net, 1)
    loss.backward(retain_graph=True)
    loss.backward()
    job.record_model(net, "retained", gradients=True)
    seen = []

    def slope(module: Any, args: Any, out: torch.Tensor) -> None:
        (g,) = torch.autograd.grad(out.square().mean(), module.weight, retain_graph=True)
        seen.append(g)

    net.down.register_forward_hook(slope)
    job.train(net, torch.optim.SGD(net.parameters(), lr=0.1), 1)
    job.record("in a hook", seen)
