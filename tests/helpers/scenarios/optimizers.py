"""Optimizers and losses that look at the parameters themselves, not only at their gradients."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import autoshard
from scenarios.job import WIDTH, Job

Make = Callable[[Any], torch.optim.Optimizer]


def steps_of(make: Make, matrices: bool = False, made: str = "before") -> Callable[[Job], None]:
    """Three steps of an optimizer made before or after the first call; matrices: of those only."""

    def scenario(job: Job) -> None:
        net, compiled = job.pair()
        if made == "after":
            job.loss(compiled)
        chosen = [p for p in net.parameters() if p.dim() == 2 or not matrices]
        optimizer = make(chosen)
        job.train(compiled, optimizer, 3)
        job.is_stored(net, "up.weight")
        job.record_model(net)
        state = optimizer.state_dict()
        job.record("state", [[*map(str, one)] for one in state["state"].values()])

    return scenario


OPTIMIZERS: dict[str, Make] = {
    "SGD momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "AdamW foreach": functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3, foreach=True),
    "AdamW fused": functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3, fused=True),
    "Adam amsgrad": functools.partial(torch.optim.Adam, lr=1e-2, eps=1e-3, amsgrad=True),
    "Adafactor": functools.partial(torch.optim.Adafactor, lr=1e-2),
    "Rprop": functools.partial(torch.optim.Rprop, lr=1e-3),
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=1e-3, eps=1e-3, centered=True),
    "Adagrad": functools.partial(torch.optim.Adagrad, lr=1e-2, eps=1e-3),
    "NAdam": functools.partial(torch.optim.NAdam, lr=1e-2, eps=1e-3),
    "ASGD": functools.partial(torch.optim.ASGD, lr=1e-2),
}


def muon(job: Job) -> None:
    """Muon on the matrices, whose steps need each whole, and AdamW on the rest."""
    job.tolerance = 1e-2  # it orthogonalises in bf16
    net, compiled = job.pair()
    matrices = [p for p in net.parameters() if p.dim() == 2]
    rest = [p for p in net.parameters() if p.dim() != 2]
    both = [
        torch.optim.Muon(matrices, lr=1e-2),
        torch.optim.AdamW(rest, lr=1e-2, eps=1e-3),
    ]
    for step in range(3):
        job.backward(compiled, step)
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
    job.record_model(net)


def lbfgs(job: Job) -> None:
    """LBFGS, whose closure makes the first call, with and without a line search."""
    for search in (None, "strong_wolfe"):
        net, compiled = job.pair()
        optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=4, line_search_fn=search)

        def closure(
            optimizer: torch.optim.Optimizer = optimizer, compiled: Any = compiled
        ) -> torch.Tensor:
            optimizer.zero_grad()
            loss = job.everyone_loss(job.loss(compiled))
            loss.backward()
            return loss

        for step in range(2):
            loss = optimizer.step(closure)  # type: ignore[arg-type]
            job.record(f"{search} {step}", job.everyone(loss))
        job.record_model(net, f"{search}")
        job.is_stored(net, "up.weight")


def sam(job: Job) -> None:
    """Sharpness-aware minimisation: up the gradient by add_, back by sub_ and by `.data =`."""
    for how in ("sub_", "data"):
        net, compiled = job.pair()
        base = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for step in range(2):
            job.backward(compiled, step)
            grads = [p.grad for p in net.parameters() if p.grad is not None]
            norm = torch.norm(torch.stack([g.norm(p=2) for g in grads]), p=2)
            job.record(f"{how} {step} norm", norm.item())
            old = {p: p.data.clone() for p in net.parameters()}
            moves = {}
            with torch.no_grad():
                for p in net.parameters():
                    moves[p] = p.grad * (0.05 / (norm + 1e-12)).to(p)  # type: ignore[operator]
                    p.add_(moves[p])
            net.zero_grad()
            job.backward(compiled, step)
            with torch.no_grad():
                for p in net.parameters():
                    if how == "data":
                        p.data = old[p]
                    else:
                        p.sub_(moves[p])
            base.step()
            base.zero_grad()
        job.record_model(net, how)


def penalty(job: Job) -> None:
    """L2 and L1 over `model.parameters()` beside the loss, from the first call on."""
    net, compiled = job.pair()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for step in range(3):
        loss = job.loss(compiled, step)
        loss = loss + 1e-2 * sum(p.square().sum() for p in net.parameters())
        loss = loss + 1e-3 * sum(p.abs().sum() for p in net.parameters() if p.dim() > 1)
        loss = loss + 1e-3 * sum(torch.norm(p) for p in (net.up.weight, net.down.weight))
        optimizer.zero_grad()
        loss.backward()
        job.record_loss(loss, step)
        job.record_model(net, f"{step}", gradients=True)
        optimizer.step()
    job.record_model(net)


def anchored(job: Job) -> None:
    """A penalty on the distance from where the weights began (EWC, L2-SP), plain and detached."""
    net = job.net()
    start = {name: p.detach().clone() for name, p in net.named_parameters()}
    compiled = job.compile(net)
    job.train(compiled, torch.optim.SGD(net.parameters(), lr=0.1), 1)
    later = {name: p.detach().clone() for name, p in net.named_parameters()}
    net.zero_grad()
    for anchor in (start, later):
        loss = job.loss(compiled, 1) + sum(
            ((p - anchor[name]) ** 2).sum() for name, p in net.named_parameters()
        )
        loss.backward()
        job.record_loss(loss)
    job.record_model(net, gradients=True)
    drift = torch.cat([(p - start[n]).flatten() for n, p in net.named_parameters()])
    job.record("drift", drift.norm().item())


def vectors(job: Job) -> None:
    """`parameters_to_vector` and back; gradients as one vector."""
    net, compiled = job.pair()
    job.train(compiled, torch.optim.SGD(net.parameters(), lr=0.1), 1)
    vector = nn.utils.parameters_to_vector(net.parameters())
    job.record("vector", vector)
    job.record("gradients", torch.cat([p.grad.flatten() for p in net.parameters()]))  # type: ignore[union-attr]
    nn.utils.vector_to_parameters(vector.detach() * 0.9, net.parameters())
    job.record_model(net, "scaled")
    torch.manual_seed(2)
    nn.utils.vector_to_parameters(torch.randn(vector.numel()) * 0.1, net.parameters())
    job.record_model(net, "plain")
    net.zero_grad()
    job.train(compiled, torch.optim.SGD(net.parameters(), lr=0.1), [1])
    job.record_model(net)


def in_backward(job: Job) -> None:
    """An optimizer a parameter, which steps in a post-accumulate hook and drops the gradient."""
    for when, net, compiled in job.around_the_first_call():
        each = {p: torch.optim.AdamW([p], lr=1e-2, eps=1e-3) for p in net.parameters()}

        def step_now(p: torch.Tensor, each: dict[Any, Any] = each) -> None:
            each[p].step()
            each[p].zero_grad()

        for p in net.parameters():
            p.register_post_accumulate_grad_hook(step_now)
        for step in range(3):
            job.backward(compiled, step)
            job.record(f"{when} {step} dropped", [p.grad is None for p in net.parameters()])
        job.record_model(net, when)


def scaler(job: Job) -> None:
    """GradScaler with unscaling and clipping, and one step that an inf skips."""
    net, compiled = job.pair()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3)
    scale = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for step in range(3):
        optimizer.zero_grad()
        loss = job.loss(compiled, step)
        scale.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
        scale.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        job.record(f"finite {step}", bool(torch.isfinite(norm)))
        scale.step(optimizer)
        scale.update()
        job.record(f"scale {step}", scale.get_scale())
        job.record_model(net, f"{step}")


def sparse_embedding(job: Job) -> None:
    """`nn.Embedding(sparse=True)`, whose gradient is dense for a stored table."""
    sparse: dict[str, Make] = {
        "SGD": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "Adagrad": functools.partial(torch.optim.Adagrad, lr=1e-2, eps=1e-3),
    }
    for name, make in sparse.items():
        torch.manual_seed(1)
        net = nn.Sequential(nn.Embedding(24, WIDTH, sparse=True), nn.Linear(WIDTH, 24))
        compiled = job.compile(net)
        optimizers = [make([*net[0].parameters()]), torch.optim.SGD(net[1].parameters(), lr=0.1)]
        for step in range(2):
            ids = job.ids(step, 24)
            loss = F.cross_entropy(compiled(ids).flatten(0, 1), ids.flatten())
            job.record_loss(loss, step)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        job.record_model(net, name)


def bounded_embedding(job: Job) -> None:
    """`nn.Embedding(max_norm=...)` renormalises the rows it reads, in place; refused along
    data-parallel axes, where each rank reads others."""
    job.refusable = job.ranks > 1
    torch.manual_seed(1)
    net = nn.Sequential(nn.Embedding(24, WIDTH, max_norm=1.0), nn.Linear(WIDTH, 24))
    compiled = job.compile(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(2):
        ids = job.ids(0, 24)  # on dp each rank renormalises its own rows
        loss = F.cross_entropy(compiled(ids).flatten(0, 1), ids.flatten())
        job.record_loss(loss, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    job.record_model(net)


def schedules(job: Job) -> None:
    """Schedulers, a parameter group added late, the optimizer's state dict loaded again."""
    net, compiled = job.pair()
    optimizer = torch.optim.AdamW([net.up.weight, net.down.weight], lr=1e-2, eps=1e-3)
    job.train(compiled, optimizer, 1)
    rest = [p for p in net.parameters() if p.dim() != 2]
    optimizer.add_param_group({"params": rest, "lr": 1e-3})
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=6)
    for step in range(1, 4):
        job.train(compiled, optimizer, [step])
        schedule.step()
    again = torch.optim.AdamW(
        [{"params": [net.up.weight, net.down.weight]}, {"params": rest}], lr=1.0, eps=1e-3
    )
    again.load_state_dict(optimizer.state_dict())
    job.train(compiled, again, [4])
    job.record_model(net)


def lookahead(job: Job) -> None:
    """Lookahead by hand: slow weights, and swapped values by `.data`."""
    net, compiled = job.pair()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    slow = [p.clone().detach() for p in net.parameters()]
    for step in range(4):
        job.train(compiled, optimizer, [step])
        if step % 2:
            for p, s in zip(net.parameters(), slow):
                s.data.add_(p.data - s.data, alpha=0.5)
                p.data.copy_(s.data)
    job.record_model(net)
    job.record("slow", slow)


def taken_over(name: str) -> Callable[[Job], None]:
    """An optimizer of which a function of autoshard takes the step: the same object to the loop."""

    def scenario(job: Job) -> None:
        def adamw(groups: Any, ours: bool = True) -> torch.optim.Optimizer:
            made = torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)
            if ours and job.sharded:
                assert getattr(autoshard, name)(made) is made
            return made

        for when, net, compiled in job.around_the_first_call():
            looped(job, when, net, compiled, adamw)

    return scenario


def looped(job: Job, when: str, net: Any, compiled: Any, adamw: Callable[..., Any]) -> None:
    """Two groups, a schedule, clipping, an inf that GradScaler finds, a weight written between
    steps, a group added late, hooks, gradients zeroed; the state dict loaded into an optimizer
    whose step is taken over, and into a plain one; an optimizer and its model through a file."""

    def step(model: Any, optimizer: Any, scale: Any, number: int, times: float = 1.0) -> None:
        scale.scale(job.loss(model, number) * times).backward()
        scale.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scale.step(optimizer)
        scale.update()
        model.zero_grad(set_to_none=number % 2 == 0)

    net.zero_grad()
    scale = torch.amp.GradScaler("cpu", init_scale=64.0)
    rest = {"params": [net.norm.weight, net.norm.bias], "lr": 1e-3, "weight_decay": 0.0}
    optimizer = adamw([{"params": [net.up.weight, net.down.weight]}, rest])
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    for number in range(3):
        step(compiled, optimizer, scale, number, float("inf") if number == 1 else 1.0)
        schedule.step()
        if number == 0:
            net.up.weight.data.mul_(0.5)
            optimizer.add_param_group({"params": [net.up.bias, net.logit_scale]})
    job.is_stored(net, "up.weight")
    job.record(f"{when} hooks", called)
    job.record_model(net, when)
    state = optimizer.state_dict()
    job.record(f"{when} state", state["state"])
    for ours in (True, False):
        again = adamw([{"params": group["params"]} for group in optimizer.param_groups], ours)
        again.load_state_dict(state)
        step(compiled, again, scale, 3)
        job.record_model(net, f"{when}, loaded, taken over {ours}")
    net.zero_grad()
    file = io.BytesIO()
    torch.save((net, optimizer), file)
    file.seek(0)
    other, own = torch.load(file, weights_only=False)
    step(job.compile(other), own, scale, 4)
    job.record_model(other, f"{when}, from a file")
