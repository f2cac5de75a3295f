"""Copies of a model and of its values: EMA, deepcopy, pickle, files, state dicts."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import swa_utils

from scenarios.job import Job, Net


def averaged(job: Job) -> None:
    """`swa_utils.AveragedModel`, made before and after the first call, of the model and the
    compiled one; its forward is evaluated."""
    for when, net, compiled in job.around_the_first_call():
        ema = swa_utils.AveragedModel(net, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(3):
            job.train(compiled, optimizer, [step])
            ema.update_parameters(net)
        job.record_model(ema.module, when)
        with torch.no_grad():
            job.record_loss(job.loss(ema))
        job.record(f"{when} count", int(ema.n_averaged))


def averaged_by_hand(job: Job) -> None:
    """An EMA of a state dict, and one of a deep copy, with values swapped in for evaluation."""
    net = job.net()
    shadow = {name: p.detach().clone() for name, p in net.named_parameters()}
    compiled = job.compile(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(2):
        job.train(compiled, optimizer, [step])
        for name, p in net.named_parameters():
            shadow[name] = 0.9 * shadow[name] + 0.1 * p.detach()
    job.record("shadow", shadow)
    with torch.no_grad():
        backup = {name: p.clone() for name, p in net.named_parameters()}
        for name, p in net.named_parameters():
            p.data.copy_(shadow[name])
        job.record_loss(job.loss(compiled))
        for name, p in net.named_parameters():
            p.copy_(backup[name])
        late = {name: value.clone() for name, value in net.state_dict().items()}
        for name, value in net.state_dict().items():
            late[name].mul_(0.5).add_(value, alpha=0.5).lerp_(shadow[name], 0.1)
    job.record("late", late)
    job.train(compiled, optimizer, [2])
    job.record_model(net)


def ema_of_a_copy(job: Job) -> None:
    """timm's ModelEmaV3 by hand: a deep copy in eval mode, moved by lerp_ after each step."""
    for when, net, compiled in job.around_the_first_call():
        ema = copy.deepcopy(net).eval()
        for p in ema.parameters():
            p.requires_grad_(False)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3)
        for step in range(2):
            job.train(compiled, optimizer, [step])
            with torch.no_grad():
                for e, p in zip(ema.state_dict().values(), net.state_dict().values()):
                    e.copy_(e * 0.8 + p * 0.2) if step else e.lerp_(p, weight=0.2)
        job.record_model(ema, when)
        with torch.no_grad():
            job.record_loss(job.loss(ema))


def deep_copies(job: Job) -> None:
    """`copy.deepcopy` before the first call, after backward (with gradients) and after a step:
    the copies and the original train apart."""
    net = job.net()
    early = copy.deepcopy(net)
    compiled = job.compile(net)
    job.backward(compiled)
    with_gradients = copy.deepcopy(net)
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    late = copy.deepcopy(net)
    job.record_model(with_gradients, "after backward", gradients=True)
    for name, one in {"early": early, "with gradients": with_gradients, "late": late}.items():
        one.zero_grad()
        again = job.compile(one)
        job.train(again, torch.optim.SGD(one.parameters(), lr=0.1), [1])
        job.record_model(one, name)
    job.record_model(net, "original")
    net.zero_grad()
    job.backward(compiled, 2)
    job.record_model(net, "original", gradients=True)


def copied_tensors(job: Job) -> None:
    """Copies of single parameters: deepcopy, clone, copy of a module, new Parameters of values."""
    net, compiled = job.pair()
    job.backward(compiled)
    kept = [
        copy.deepcopy(net.up.weight),
        net.up.weight.detach().clone(),
        net.up.weight.data.clone(),
    ]
    layer = copy.deepcopy(net.up)
    fresh = nn.Linear(16, 33)
    fresh.weight = nn.Parameter(net.up.weight.detach().clone())
    fresh.load_state_dict(net.up.state_dict())
    shared = copy.copy(net.up)
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    job.record("kept", [*kept, layer.weight, fresh.weight])
    job.record("shared", shared.weight is net.up.weight)
    x, _ = job.rows(0)
    job.record("eager", [job.everyone(m(x).mean()) for m in (layer, fresh, shared)])


def pickled(job: Job) -> None:
    """A model through pickle and through `torch.save`, whole, after backward, and trained on."""
    net, compiled = job.pair()
    job.train(compiled, torch.optim.SGD(net.parameters(), lr=0.1), 1)
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    for name, one in {
        "pickle": pickle.loads(pickle.dumps(net)),
        "save": torch.load(buffer, weights_only=False),
    }.items():
        job.record_model(one, name)
        again = job.compile(one)
        one.zero_grad()
        job.train(again, torch.optim.SGD(one.parameters(), lr=0.1), [1])
        job.record_model(one, f"{name}, trained on")


def _saved_by_first(job: Job, what: Any, name: str) -> Path:
    """Rank 0 writes, as a training script does; all wait."""
    path = Path(job.folder) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if not job.sharded or dist.get_rank() == 0:
        torch.save(what, path)
    if job.sharded:
        dist.barrier()
    return path


def state_dict_files(job: Job) -> None:
    """A state dict made whole on every rank and saved by the first; loaded with weights_only into
    a plain model, into the sharded one, and the other way round."""
    net, compiled = job.pair()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3)
    job.train(compiled, optimizer, 2)
    state = {name: job.whole(value) for name, value in net.state_dict().items()}
    path = _saved_by_first(job, state, "state.pt")
    plain = Net()
    plain.load_state_dict(torch.load(path, weights_only=True))
    job.record_model(plain, "plain")
    job.train(compiled, optimizer, [2])
    net.load_state_dict(torch.load(path, weights_only=True))
    job.record_model(net, "back")
    job.is_stored(net, "up.weight")
    net.zero_grad()
    job.backward(compiled, 3)
    fresh = Net()
    again = job.compile(fresh)
    fresh.load_state_dict(torch.load(path, weights_only=True))
    job.backward(again, 3)
    job.record_model(fresh, "fresh", gradients=True)


def own_state_dict(job: Job) -> None:
    """`torch.save(model.state_dict())` and of the optimizer as they are, each rank its own file,
    and what is loaded is put into a model that no call has stored, and one that has been."""
    net, compiled = job.pair()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3)
    job.train(compiled, optimizer, 2)
    buffer = io.BytesIO()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    job.train(compiled, optimizer, [2])
    net.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    job.train(compiled, optimizer, [2])
    job.record_model(net, "resumed")
    unused = Net()
    unused.load_state_dict(loaded["model"])
    job.record_model(unused, "never called")
    job.backward(job.compile(unused), 3)


def state_dicts(job: Job) -> None:
    """Plain state dicts loaded: strict and not, a part, assign=True, with a prefix, a copy kept."""
    net, compiled = job.pair()
    job.backward(compiled)
    torch.manual_seed(9)
    other = Net()
    plain = {name: torch.randn_like(value) * 0.1 for name, value in other.state_dict().items()}
    net.load_state_dict(plain)
    job.record_model(net, "whole")
    job.record("missing", [*net.load_state_dict({"up.bias": plain["norm.bias"]}, strict=False)[0]])
    job.record_model(net, "a part")
    net.up.load_state_dict({"weight": plain["up.weight"] * 2, "bias": plain["up.bias"]})
    compiled.load_state_dict(
        {f"{'_orig_mod.' if job.sharded else ''}{name}": value for name, value in plain.items()}
    )
    net.zero_grad()
    job.train(compiled, torch.optim.SGD(net.parameters(), lr=0.1), [1])
    best = copy.deepcopy(net.state_dict())
    job.train(compiled, torch.optim.SGD(net.parameters(), lr=0.1), [2])
    net.load_state_dict(best)
    job.record_model(net, "best again")
    net.load_state_dict(plain, assign=True)
    job.record_model(net, "assigned")
    net.zero_grad()
    job.train(compiled, torch.optim.SGD(net.parameters(), lr=0.1), [3])
    job.record_model(net, "trained on")


def values_between_models(job: Job) -> None:
    """Values from a sharded model to a plain one and back, parameter by parameter (target nets)."""
    net, compiled = job.pair()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    target = Net()
    job.train(compiled, optimizer, 1)
    target.load_state_dict(net.state_dict())
    job.train(compiled, optimizer, [1])
    for t, p in zip(target.parameters(), net.parameters()):
        t.data.copy_(t.data * 0.95 + p.data * 0.05)
    with torch.no_grad():
        for t, p in zip(target.parameters(), net.parameters()):
            t.mul_(0.5)
            t.add_(p, alpha=0.5)
    job.record_model(target, "target")
    with torch.no_grad():
        for t, p in zip(target.parameters(), net.parameters()):
            p.copy_(t)
    job.train(compiled, optimizer, [2])
    job.record_model(net)
    distance = sum(
        float((t - p).detach().abs().sum()) for t, p in zip(target.parameters(), net.parameters())
    )
    job.record("distance", distance)
