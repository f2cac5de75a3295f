"""Functions of stored parameters that another backend compiles: steps, averages, losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from scenarios.job import Job


def compiled(fn: Any, **kwargs: Any) -> Any:
    """`fn` as the user compiles it: not by our backend, and in the serial run too."""
    return torch.compile(fn, backend="aot_eager", **kwargs)


def optimizer_step(job: Job) -> None:
    """torch's recipe, with clipping before it and a learning rate that is a tensor."""
    net, model = job.pair()
    for name, make in (
        ("sgd", lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
        ("adamw", lambda p: torch.optim.AdamW(p, torch.tensor(1e-2), eps=1e-3, foreach=False)),
    ):
        optimizer = make(net.parameters())
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)

        def step(optimizer: Any = optimizer) -> None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()

        step = compiled(step)
        for i in range(3):
            optimizer.zero_grad()
            job.backward(model, i)
            step()
            schedule.step()
            job.record_model(net, f"{name} {i}")
            job.record_model(net, f"{name} {i}", gradients=True)
        states = optimizer.state_dict()["state"]
        job.record(f"{name} states", [states[i] for i in sorted(states)])
    job.is_stored(net, "up.weight")


def update_of_parts(job: Job) -> None:
    """One graph of a parameter, its gradient and its state, and an average of the model."""
    torch._dynamo.reset()  # a graph for each shape and placement: with serial's, too many
    net, model = job.pair()
    plain = [p.detach().clone() for p in net.parameters()]  # stays whole on each rank
    state: dict[str, torch.Tensor] = {}
    averages: list[torch.Tensor] = []

    @torch.no_grad()
    def update(p: nn.Parameter, grad: torch.Tensor, m: torch.Tensor, rate: torch.Tensor) -> None:
        m.lerp_(grad, 0.1)
        p.data.sub_(m * rate)
        p.mul_(1 - rate * 0.01)

    @torch.no_grad()
    def average(own: list[torch.Tensor], whole: list[torch.Tensor]) -> torch.Tensor:
        torch._foreach_lerp_(own, list(net.parameters()), 0.3)
        for a, p in zip(whole, net.parameters()):
            a.lerp_(p, 0.3)
        return sum(p.norm() for p in net.parameters())  # type: ignore[return-value]

    update = compiled(update, fullgraph=True)
    average = compiled(average, fullgraph=True)
    for i in range(3):
        net.zero_grad()
        job.backward(model, i)
        averages = averages or [p.detach().clone() for p in net.parameters()]
        for name, p in net.named_parameters():
            assert p.grad is not None
            update(p, p.grad, state.setdefault(name, torch.zeros_like(p)), torch.tensor(0.5))
        job.record(f"norms {i}", average(averages, plain))
        job.record_model(net, f"{i}")
    job.record("state", [*state.values(), *averages, *plain])
    job.is_stored(net, "up.weight")


def broken_graphs(job: Job) -> None:
    """What eager code does of a compiled function: views, random numbers, gradients of a read."""
    net, model = job.pair()

    def changed(p: nn.Parameter) -> float:
        with torch.no_grad():
            net.logit_scale.mul_(1.1)
            p.data.view(-1)[:1].fill_(0.2)
            if p.dim() == 2:
                p.T.mul_(0.9)
                p[1:3] = 0.1
            torch.manual_seed(3)
            p.add_(torch.randn_like(p), alpha=0.01)
        return p.abs().max().item()

    def penalised(loss: torch.Tensor) -> torch.Tensor:
        return loss + 0.01 * (net.up.weight @ net.down.weight).square().sum()

    changed, penalised = compiled(changed), compiled(penalised)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for i in range(2):
        optimizer.zero_grad()
        loss = penalised(job.loss(model, i))
        job.record_loss(loss, i)
        loss.backward()
        job.record_model(net, f"{i}", gradients=True)
        optimizer.step()
        row = net.up.weight.data[0]
        job.record(f"largest {i}", [changed(p) for p in net.parameters()])
        job.record(f"row {i}", row + 0)  # a view sees what the graph has written
        compiled(lambda view: view.data.add_(1))(row)
        job.record_model(net, f"{i}")
