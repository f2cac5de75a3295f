"""Further things that people do around a step, beside those of the other files."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, grad_and_value, jacfwd, jacrev, jvp, vmap
from torch.nn import functional as F
from torch.optim import swa_utils

from autoshard.errors import AutoshardError
from scenarios.job import WIDTH, Job, Net


def stochastic_averaging(job: Job) -> None:
    """`swa_utils`: SWALR, an AveragedModel of the parameters and its weights taken over."""
    net, compiled = job.pair()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    averaged = swa_utils.AveragedModel(net, avg_fn=lambda a, p, n: a + (p - a) / (n + 1))
    scheduler = swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    for step in range(3):
        job.train(compiled, optimizer, [step])
        averaged.update_parameters(net)
        scheduler.step()
    job.record_model(averaged.module, "averaged")
    net.load_state_dict(averaged.module.state_dict())
    job.train(compiled, optimizer, [3])
    job.record_model(net, "gone on")
    state = copy.deepcopy(averaged.state_dict())
    averaged.load_state_dict(state)
    job.record("count", int(averaged.n_averaged))


def zeroed_gradients(job: Job) -> None:
    """`zero_grad(set_to_none=False)`, gradients kept and set by hand over several steps."""
    net, compiled = job.pair()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        job.backward(compiled, step)
        optimizer.step()
    job.record_model(net, gradients=True)
    net.zero_grad(set_to_none=False)
    job.record("zero", [float(p.grad.abs().sum()) for p in net.parameters()])  # type: ignore[union-attr]
    saved = [p.grad for p in net.parameters()]
    net.zero_grad()
    job.backward(compiled, 3)
    for p, old in zip(net.parameters(), saved):
        old.copy_(p.grad)  # type: ignore[union-attr, arg-type]
        p.grad = old
    job.backward(compiled, 4)
    job.record_model(net, "set by hand", gradients=True)


def state_hooks(job: Job) -> None:
    """Hooks of the state dict: a key renamed, a value cast, and taken back before loading."""
    net = job.net()

    def saved(module: Any, state: Any, prefix: str, meta: Any) -> None:
        state[f"{prefix}scaled"] = state.pop(f"{prefix}logit_scale") * 2
        state[f"{prefix}up.weight"] = state[f"{prefix}up.weight"].to(torch.bfloat16)

    def loaded(module: Any, state: Any, prefix: str, *rest: Any) -> None:
        state[f"{prefix}logit_scale"] = state.pop(f"{prefix}scaled") / 2

    net.register_state_dict_post_hook(saved)
    net.register_load_state_dict_pre_hook(loaded)
    compiled = job.compile(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    job.train(compiled, optimizer, 1)
    state = net.state_dict()
    job.record("keys", [*state])
    job.record("values", [job.whole(v) for v in state.values()])
    job.train(compiled, optimizer, [1])
    net.load_state_dict(state)
    job.train(compiled, optimizer, [2])
    job.record_model(net)


def shallow_copies(job: Job) -> None:
    """`copy.copy` of a model and of a module: the parameters are shared, and both train."""
    net, compiled = job.pair()
    job.backward(compiled)
    twin = copy.copy(net)
    twin.up = copy.copy(net.up)
    job.record("one", twin.up.weight is net.up.weight)
    again = job.compile(twin)
    job.backward(again, 1)
    job.record_model(net, "both", gradients=True)
    twin.up.bias = nn.Parameter(torch.zeros(33))
    net.zero_grad()
    twin.zero_grad()
    job.backward(again, 2)
    job.backward(compiled, 3)
    job.record_model(net, "net", gradients=True)
    job.record_model(twin, "twin", gradients=True)


class _Gained(Net):
    """A number of the module's own, beside its parameters."""

    gain = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x) * self.gain
        return y


def shallow_copy_of_compiled(job: Job) -> None:
    """A copy of a model after `model.compile()`, which has a number of its own."""
    torch.manual_seed(1)
    net = _Gained()
    if job.sharded:
        net.compile(backend="autoshard", options=job.options())
    job.backward(net)
    twin = copy.copy(net)
    twin.gain = 3.0
    net.zero_grad()
    job.backward(twin, 1)
    job.record_model(net, gradients=True)


def optimizer_pickled(job: Job) -> None:
    """An optimizer through pickle, a deep copy of its state, and its state put into a fresh one."""
    net, compiled = job.pair()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3)
    job.train(compiled, optimizer, 2)
    state = pickle.loads(pickle.dumps(optimizer.state_dict()))
    kept = copy.deepcopy(optimizer.state_dict())
    job.record("state", [job.whole(s["exp_avg"]) for s in state["state"].values()])
    job.train(compiled, optimizer, [2])
    for name, one in (("pickled", state), ("copied", kept)):
        fresh = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3)
        fresh.load_state_dict(one)
        job.train(compiled, fresh, [3])
        job.record_model(net, name)
    buffer = io.BytesIO()
    torch.save((net, optimizer), buffer)
    buffer.seek(0)
    other, own = torch.load(buffer, weights_only=False)
    job.train(job.compile(other), own, [4])
    job.record_model(other, "together")


def late_groups(job: Job) -> None:
    """`add_param_group` mid-training, of thawed layers and of a new layer; rates by group."""
    net = job.net()
    net.up.requires_grad_(False)
    compiled = job.compile(net)
    optimizer = torch.optim.AdamW(
        [p for p in net.parameters() if p.requires_grad], lr=1e-2, eps=1e-3
    )
    job.train(compiled, optimizer, 2)
    net.up.requires_grad_(True)
    optimizer.add_param_group({"params": [*net.up.parameters()], "lr": 5e-3, "weight_decay": 0.0})
    job.train(compiled, optimizer, [2, 3])
    job.record_model(net)
    job.record("groups", [len(group["params"]) for group in optimizer.param_groups])


def half_and_back(job: Job) -> None:
    """`half()` for an evaluation, on a deep copy, and a state dict of low precision loaded."""
    net, compiled = job.pair()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    job.train(compiled, optimizer, 1)
    low = copy.deepcopy(net).half()
    job.record_model(low, "half")
    net.load_state_dict(low.state_dict())
    job.train(compiled, optimizer, [1])
    job.record_model(net)
    with torch.no_grad():
        x, _ = job.rows(2)
        job.record("low", job.everyone(low.float()(x).square().mean()))


def moved(job: Job) -> None:
    """`share_memory`, `to("cpu")`, `cpu()`, `to(memory_format)`, `requires_grad_`, `eval`."""
    net, compiled = job.pair()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    job.train(compiled, optimizer, 1)
    net.share_memory()
    net.to("cpu").cpu()
    net.to(torch.float32)
    job.train(compiled, optimizer, [1])
    net.eval()
    with torch.inference_mode():
        job.record_loss(job.loss(compiled, 2))
    net.train()
    job.train(compiled, optimizer, [2])
    job.record_model(net)
    job.record("bytes", sum(p.numel() * p.element_size() for p in net.parameters()))


def profiled(job: Job) -> None:
    """A step under the profiler, under anomaly detection, and with the saved tensors on the CPU."""
    net, compiled = job.pair()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    job.train(compiled, optimizer, 1)
    with torch.profiler.profile() as profile:
        job.train(compiled, optimizer, [1])
    assert profile.events()
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        job.train(compiled, optimizer, [2])
    with torch.autograd.graph.save_on_cpu():
        job.train(compiled, optimizer, [3])
    job.record_model(net)


def functional_training(job: Job) -> None:
    """torch.func by the parameters: of stored ones refused by name, of whole ones as serial."""
    net, compiled = job.pair()
    job.backward(compiled)
    net.zero_grad()
    x, y = job.rows(1)

    def loss(values: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(functional_call(net, values, (x,)), y)

    stored = dict(net.named_parameters())
    if job.sharded:
        weight = net.up.weight
        for ask in (
            lambda: grad(loss)(stored, x, y),
            lambda: grad(loss)({n: p.detach() for n, p in stored.items()}, x, y),
            lambda: jacrev(lambda w: F.linear(x, w))(weight),
            lambda: vmap(lambda w: x @ w)(weight),
            lambda: jvp(lambda w: F.linear(x, w), (weight,), (torch.ones(33, WIDTH),)),
            lambda: jacfwd(lambda w: F.linear(x, w))(weight),
        ):
            try:
                ask()
                raise AssertionError("a transform of a stored tensor was not refused")
            except AutoshardError as error:
                assert "a stored tensor of shape" in str(error), error
    with forward_ad.dual_level():
        dual = F.linear(x, forward_ad.make_dual(net.up.weight, torch.ones(33, WIDTH)))
        job.record("dual", job.everyone(forward_ad.unpack_dual(dual).tangent.detach().mean()))
    values = {name: job.whole(p.detach()) for name, p in stored.items()}
    grads, value = grad_and_value(loss)(values, x, y)
    job.record("value", job.everyone(value))
    job.record("grads", {name: job.everyone(g) for name, g in grads.items()})
    each = vmap(grad(loss), in_dims=(None, 0, 0))(values, x, y)
    job.record("each", {n: job.everyone(g.mean(0)) for n, g in each.items()})


def exported(job: Job) -> None:
    """`torch.export` after the first call: of the stored model refused by name, of one that the
    whole state is loaded into as serial."""
    net, compiled = job.pair()
    job.train(compiled, torch.optim.SGD(net.parameters(), lr=0.1), 1)
    x = torch.ones(4, WIDTH)
    whole = Net()
    whole.load_state_dict({name: job.whole(p) for name, p in net.state_dict().items()})
    if job.sharded:
        for strict in (False, True):
            try:
                torch.export.export(net.eval(), (x,), strict=strict)
                raise AssertionError("the export of a stored model was not refused")
            except AutoshardError as error:
                assert "whose parameters are stored on the mesh" in str(error), error
    job.record("out", torch.export.export(whole.eval(), (x,)).module()(x).detach())


def read_between(job: Job) -> None:
    """Values logged in each step: fractions of zeros, quantiles, a histogram, update ratios."""
    net, compiled = job.pair()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(2):
        before = {n: p.detach().clone() for n, p in net.named_parameters()}
        job.train(compiled, optimizer, [step])
        with torch.no_grad():
            for n, p in net.named_parameters():
                job.record(f"{step} {n} ratio", float((p - before[n]).norm() / p.norm()))
                job.record(f"{step} {n} max", float(p.grad.abs().max()))  # type: ignore[union-attr]
                job.record(f"{step} {n} zeros", float((p.grad == 0).float().mean()))
                job.record(f"{step} {n} std", float(p.std(unbiased=False)))
                job.record(f"{step} {n} median", p.flatten().quantile(0.5))
    total = torch.cat([p.detach().flatten() for p in net.parameters()])
    job.record("histogram", torch.histc(total, 8))
    job.record("finite", all(torch.isfinite(p).all() for p in net.parameters()))
    job.record("condition", torch.linalg.svdvals(net.up.weight.detach())[:3])


class _Converted(Net):
    """A part that forward itself converts, as routers do, in the first call; between two graphs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.gelu(self.up(x))
        torch._dynamo.graph_break()
        self.norm = self.norm.to(torch.float64)
        torch._dynamo.graph_break()
        return self.down(self.norm(h.double()).to(h.dtype)) * self.logit_scale.exp()  # type: ignore[no-any-return]


def converted(job: Job) -> None:
    """`self.norm = self.norm.to(dtype)` in forward, and another model after it."""
    torch.manual_seed(1)
    net = _Converted()
    job.train(job.compile(net), torch.optim.SGD(net.parameters(), lr=0.1))
    job.record_model(net)
    other, compiled = job.pair()
    job.train(compiled, torch.optim.SGD(other.parameters(), lr=0.1))
    job.record_model(other, "other")
