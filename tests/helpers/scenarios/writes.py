"""Writes to a parameter through its module, of every form: the next step computes with them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from scenarios.job import WIDTH, Job, Net

Scenario = Callable[[Job], None]


def between_steps(change: Callable[[Net], Any], before: bool = False) -> Scenario:
    """A step, the write, and another step. before: the write once more, ahead of the first call."""

    def scenario(job: Job) -> None:
        net, compiled = job.pair()
        if before:
            change(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        job.train(compiled, optimizer, 1)
        job.is_stored(net, "up.weight")
        torch.manual_seed(5)
        change(net)
        job.record_model(net, "written")
        job.train(compiled, optimizer, [1])
        job.record_model(net, "stepped")
        job.is_stored(net, "up.weight")

    return scenario


def _values(like: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1, 1, like.numel()).view(like.shape)


def data_clamp(net: Net) -> None:
    net.logit_scale.data.clamp_(0, 0.25)
    net.up.weight.data.clamp_(-0.05, 0.05)


def data_mul(net: Net) -> None:
    net.up.weight.data.mul_(0.5)


def data_row(net: Net) -> None:
    net.up.weight.data[0] = 0.7


def data_slice(net: Net) -> None:
    net.down.weight.data[2:5, ::3] = torch.arange(33.0).view(3, 11)
    net.up.bias.data[-2:] += 1


def data_mask(net: Net) -> None:
    net.up.weight.data[_values(net.up.weight) > 0.3] = 0.0


def data_copy(net: Net) -> None:
    net.up.weight.data.copy_(_values(net.up.weight))


def data_assigned(net: Net) -> None:
    net.up.weight.data = _values(net.up.weight)
    net.norm.weight.data = net.norm.weight.data * 2


def data_divided(net: Net) -> None:
    """Weights of norm one, as a metric head keeps them."""
    net.down.weight.data = nn.functional.normalize(net.down.weight.data, dim=1)


def no_grad_clamp(net: Net) -> None:
    with torch.no_grad():
        net.up.weight.clamp_(-0.05, 0.05)
        net.down.weight.add_(torch.ones(WIDTH, 33), alpha=0.01)
        net.norm.weight *= 1.5


def no_grad_slice(net: Net) -> None:
    with torch.no_grad():
        net.up.weight[1:3] = 0.25
        net.up.weight[:, 0] -= net.up.bias
        net.down.weight.index_fill_(0, torch.tensor([0, 3]), 0.0)


def no_grad_copy(net: Net) -> None:
    with torch.no_grad():
        net.up.weight.copy_(_values(net.up.weight))
        net.down.weight.copy_(net.up.weight.t())
        net.logit_scale.fill_(0.1)


def no_grad_view(net: Net) -> None:
    with torch.no_grad():
        net.up.weight.view(-1)[:7] = 0.5
        net.up.weight[0].zero_()
        net.down.weight.t()[0].fill_(0.1)
        net.up.bias.narrow(0, 3, 4).mul_(2)


def no_grad_uniform(net: Net) -> None:
    with torch.no_grad():
        net.up.weight.uniform_(-0.1, 0.1)
        net.up.bias.normal_(0, 0.02)


def detached(net: Net) -> None:
    net.up.weight.detach().mul_(0.5)
    net.up.bias.detach()[4] = 1.0


def with_out(net: Net) -> None:
    with torch.no_grad():
        torch.mul(net.up.weight, 0.5, out=net.up.weight)


def norm_limited(net: Net) -> None:
    """A limit on each row's norm, as in "max-norm" regularisation."""
    with torch.no_grad():
        net.up.weight.copy_(torch.renorm(net.up.weight, 2, 0, 0.3))


def reset_parameters(net: Net) -> None:
    net.up.reset_parameters()
    net.norm.reset_parameters()


def apply_init(net: Net) -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.xavier_normal_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    net.apply(init)


def transformers_init(net: Net) -> None:
    """`_init_weights` of a transformers model."""

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.02)
            if module.bias is not None:
                module.bias.data.zero_()

    net.apply(init)


INITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "uniform_": nn.init.uniform_,
    "normal_": nn.init.normal_,
    "trunc_normal_": lambda w: nn.init.trunc_normal_(w, std=0.02),
    "constant_": lambda w: nn.init.constant_(w, 0.3),
    "ones_": nn.init.ones_,
    "zeros_": nn.init.zeros_,
    "eye_": nn.init.eye_,
    "dirac_": lambda w: nn.init.dirac_(w.view(33, 4, 4)),
    "xavier_uniform_": nn.init.xavier_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "kaiming_normal_": nn.init.kaiming_normal_,
    "orthogonal_": nn.init.orthogonal_,
    "sparse_": lambda w: nn.init.sparse_(w, 0.3),
}


def every_init(job: Job) -> None:
    """Every function of `torch.nn.init`, with the numbers it draws on one device."""
    known = {name for name in vars(nn.init) if name.endswith("_") and name[0] != "_"}
    assert known == {*INITS}, known ^ {*INITS}
    net, compiled = job.pair()
    job.backward(compiled)
    for name, init in INITS.items():
        torch.manual_seed(7)
        init(net.up.weight)
        job.record(name, net.up.weight)
        job.is_stored(net, "up.weight")
    torch.manual_seed(8)
    nn.init.xavier_uniform_(net.up.weight)
    job.record_loss(job.loss(compiled))


def set_parameter(net: Net) -> None:
    """A new Parameter in the place of a stored one."""
    net.up.bias = nn.Parameter(torch.full((33,), 0.2))


def new_parameter(job: Job) -> None:
    """A stored weight replaced by a new Parameter, and a module by a new module."""
    net, compiled = job.pair()
    job.backward(compiled)
    net.up.weight = nn.Parameter(_values(net.up.weight.detach()))
    assert net.up.weight is dict(net.named_parameters())["up.weight"]
    torch.manual_seed(3)
    net.down = nn.Linear(33, WIDTH, bias=False)
    net.zero_grad()
    job.train(compiled, torch.optim.SGD(net.parameters(), lr=0.1), [1, 2])
    job.record("keys", [*net.state_dict()])
    job.record_model(net)
    job.record_model(net, gradients=True)


def deleted_parameter(job: Job) -> None:
    """A bias that is taken away after the first call."""
    net, compiled = job.pair()
    job.backward(compiled)
    net.up.bias = None  # type: ignore[assignment]
    net.zero_grad()
    job.backward(compiled, 1)
    job.record("keys", [*net.state_dict()])
    job.record_model(net, gradients=True)


def written_before(job: Job) -> None:
    """Writes between `torch.compile` and the first call."""
    net, compiled = job.pair()
    for change in (data_clamp, data_slice, no_grad_view, data_assigned):
        change(net)
    job.backward(compiled)
    job.record_model(net)


def clamped_each_step(job: Job) -> None:
    """Weights clamped after each step, as a WGAN's critic has them."""
    net = job.net()
    net.up.weight.data.mul_(3)
    compiled = job.compile(net)

    def clamp(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.data.clamp_(-0.1, 0.1)

    optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-2, eps=1e-3)
    for step in range(3):
        job.train(compiled, optimizer, [step])
        clamp(net)
    job.record_model(net)


def momentum_copies(job: Job) -> None:
    """MoCo's key encoder: a copy whose `.data` is moved towards the trained weights' each step."""
    for when, net, compiled in job.around_the_first_call():
        key = copy.deepcopy(net).requires_grad_(False)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(2):
            job.train(compiled, optimizer, [step])
            for k, q in zip(key.parameters(), net.parameters()):
                k.data = k.data * 0.9 + q.data * 0.1
        job.record_model(key, f"made {when}")
        with torch.no_grad():
            job.record_loss(job.loss(job.compile(key)))


class Contrast(nn.Module):
    """A MoCo whose forward moves its key encoder."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.query, self.key = net, copy.deepcopy(net).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = nn.functional.normalize(self.query(x), dim=1)
        with torch.no_grad():
            for k, p in zip(self.key.parameters(), self.query.parameters()):
                k.data = k.data * 0.9 + p.data * 0.1
            keys = nn.functional.normalize(self.key(x + 0.1), dim=1)
        return (q * keys).sum(1).mean()


def momentum_in_forward(job: Job) -> None:
    """The same in forward, whose batches are of several sizes."""
    model = Contrast(job.net())
    compiled = job.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x = torch.cat([job.rows(step)[0]] * (1 + step % 2))
        loss = compiled(x)
        job.record_loss(loss, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    job.record_model(model)
