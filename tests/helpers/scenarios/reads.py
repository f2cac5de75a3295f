"""Parameters, gradients and hooks as people read them between steps, beside plain tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from scenarios.job import WIDTH, Job, Net


def _stepped(job: Job) -> tuple[Net, Any]:
    net, compiled = job.pair()
    job.train(compiled, torch.optim.SGD(net.parameters(), lr=0.1), 1)
    job.is_stored(net, "up.weight")
    return net, compiled


def one_object(job: Job) -> None:
    """`module.weight` is the parameter that `named_parameters` and `get_parameter` give."""
    net, compiled = _stepped(job)
    for model in (net, compiled):
        named = dict(model.named_parameters())
        weight = next(p for name, p in named.items() if name.endswith("up.weight"))
        job.record(
            f"same object {len(job.found)}",
            [
                net.up.weight is weight,
                net.up._parameters["weight"] is weight,
                net.get_parameter("up.weight") is weight,
                [*net.up.parameters()][0] is weight,
                isinstance(net.up.weight, nn.Parameter),
                net.up.weight.is_leaf,
                net.up.weight.requires_grad,
                net.up.weight.grad is weight.grad,
            ],
        )
    job.record("shape", [*net.up.weight.shape, net.up.weight.numel(), net.up.weight.dim()])
    job.record("type", [str(net.up.weight.dtype), str(net.up.weight.device), len(net.up.weight)])


def identity_in_sets(job: Job) -> None:
    """Parameter groups by membership, as optimizers with and without decay are made."""
    net, compiled = _stepped(job)
    linear = {id(m.weight) for m in net.modules() if isinstance(m, nn.Linear)}
    decay = [p for p in net.parameters() if id(p) in linear]
    rest = [p for p in net.parameters() if id(p) not in linear]
    job.record("groups", [len(decay), len(rest)])
    by_name = {p: name for name, p in net.named_parameters()}
    job.record("dict", [by_name[net.up.weight], by_name[net.logit_scale], net.norm.bias in by_name])
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    job.train(compiled, torch.optim.AdamW(groups, lr=1e-2, eps=1e-3), [1, 2])
    job.record_model(net)


def gradient_attribute(job: Job) -> None:
    """`module.weight.grad`, its norm, and gradients set to None, zeroed and written by hand."""
    net, compiled = _stepped(job)
    job.record("norm", net.up.weight.grad.norm().item())  # type: ignore[union-attr]
    job.record("abs max", float(net.up.weight.grad.abs().max()))  # type: ignore[union-attr]
    job.record("numpy", float(net.up.weight.grad.cpu().numpy().sum()))  # type: ignore[union-attr]
    net.up.weight.grad.mul_(0.5)  # type: ignore[union-attr]
    net.down.weight.grad.data.clamp_(-0.01, 0.01)  # type: ignore[union-attr]
    net.up.bias.grad = torch.ones(33)
    net.norm.weight.grad = None
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    job.record_model(net)
    net.zero_grad(set_to_none=False)
    job.record("zeroed", [float(p.grad.abs().sum()) for p in (net.up.weight, net.up.bias)])  # type: ignore[union-attr]
    job.backward(compiled, 1)
    job.record_model(net, "again", gradients=True)


def norms_for_a_log(job: Job) -> None:
    """Numbers that training scripts print: norms, means, extremes, histograms, angles, changes."""
    net, compiled = _stepped(job)
    weight, grads = net.up.weight, [p.grad for p in net.parameters() if p.grad is not None]
    old = weight.detach().clone()
    job.train(compiled, torch.optim.SGD(net.parameters(), lr=0.1), [1])
    job.record("norm of data", float(weight.data.norm()))
    job.record("largest change", (weight - old).abs().max().item())
    job.record("norms", [p.norm().item() for p in net.parameters()])
    job.record("stacked", torch.stack([g.norm() for g in grads]))
    job.record("total", torch.norm(torch.stack([torch.norm(g.detach(), 2) for g in grads])).item())
    job.record("total by sum", sum(float((g**2).sum()) for g in grads) ** 0.5)
    job.record("mean, std", [weight.mean().item(), weight.std().item(), weight.var().item()])
    job.record("min, max", [weight.min().item(), weight.max().item(), weight.argmax().item()])
    job.record("histogram", torch.histc(weight.detach().float().cpu(), bins=8))
    plain = torch.linspace(-1, 1, weight.numel())
    job.record("cosine", F.cosine_similarity(weight.flatten(), plain, dim=0).item())
    job.record("dot", torch.dot(weight.detach().flatten(), plain).item())
    job.record("quantile", torch.quantile(weight.detach().abs(), 0.5).item())
    job.record("finite", [bool(torch.isfinite(p).all()) for p in net.parameters()])
    job.record("nonzero", [int(weight.count_nonzero()), int((weight > 0).sum())])
    job.record("elements", sum(p.numel() for p in net.parameters()))
    job.record("equal", [torch.equal(weight, weight.clone()), torch.allclose(weight, old, atol=9)])
    job.record("ratio", (weight.grad.norm() / (weight.norm() + 1e-6)).item())  # type: ignore[union-attr]


def values_out(job: Job) -> None:
    """Values as Python's and numpy's, printed and indexed."""
    net, _ = _stepped(job)
    job.record("item", net.logit_scale.item())
    job.record("float", [float(net.up.weight.detach()[3, 4]), float(net.logit_scale.data)])
    job.record("tolist", net.up.bias.tolist())
    job.record("numpy", net.up.weight.detach().numpy().tolist())
    job.record("cpu numpy", net.up.weight.detach().cpu().float().numpy().tolist())
    job.record("row", net.up.weight[0])
    job.record("rows", [float(row.detach().sum()) for row in net.down.weight])
    job.record("column", net.up.weight[:, -1])
    job.record("formatted", f"{net.up.weight.abs().mean():.4f} {net.logit_scale.item():.3f}")
    job.record("repr", "Parameter" in repr(net.up.weight) or job.sharded)
    str(net.up.weight), repr(net), format(net.logit_scale)


def eager_mathematics(job: Job) -> None:
    """A weight in eager operations beside plain tensors, with gradients."""
    net, _ = _stepped(job)
    net.zero_grad()
    x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)
    hidden = F.linear(x, net.up.weight, net.up.bias)
    other = x @ net.up.weight.t() + net.up.bias
    job.record("linear", [hidden, other])
    identity = net.down.weight @ net.up.weight - torch.eye(WIDTH)
    loss = identity.square().sum() + (hidden * other).mean() + torch.cat([net.up.bias, x[0]]).sum()
    job.record("loss", loss)
    loss.backward()
    job.record_model(net, gradients=True)
    job.record("svd", torch.linalg.svdvals(net.up.weight.detach()))
    job.record("where", torch.where(net.up.weight > 0, net.up.weight, torch.zeros(33, WIDTH)))
    job.record("einsum", torch.einsum("oi,bi->bo", net.up.weight, x))
    job.record("stack", torch.stack([net.up.bias, torch.ones(33)]))


def eager_forward(job: Job) -> None:
    """The model's parts called in eager code: a feature extractor, a submodule, the whole."""
    net, compiled = _stepped(job)
    x, _ = job.rows(0)
    job.record("mean of features", job.everyone(net.up(x).mean()))
    with torch.no_grad():
        job.record("whole", job.everyone(F.mse_loss(net(x), job.rows(0)[1])))
    net.zero_grad()
    F.mse_loss(net.down(net.norm(net.up(x))), job.rows(0)[1]).backward()
    job.record_model(net, gradients=True)
    net.zero_grad()
    job.backward(compiled, 1)
    job.record_model(net, "compiled", gradients=True)


def gradient_hooks(job: Job) -> None:
    """`register_hook` on a weight, set before and after the first call: it changes the gradient."""
    net, compiled = job.pair()
    seen: list[float] = []
    net.down.weight.register_hook(lambda grad: grad * 2)
    job.backward(compiled)
    job.record_model(net, "before", gradients=True)
    net.up.weight.register_hook(lambda grad: seen.append(grad.norm().item()))
    handle = net.up.bias.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    mask = torch.ones(33)
    mask[::2] = 0
    net.norm.bias.register_hook(lambda grad: grad * mask)
    net.zero_grad()
    job.backward(compiled, 1)
    job.record("seen", seen)
    job.record_model(net, "after", gradients=True)
    handle.remove()
    net.zero_grad()
    job.backward(compiled, 2)
    job.record_model(net, "removed", gradients=True)


def accumulated_hooks(job: Job) -> None:
    """`register_post_accumulate_grad_hook`, set before and after the first call."""
    for when in ("before", "after"):
        net, compiled = job.pair()
        if when == "after":
            job.backward(compiled)
            net.zero_grad()
        norms: dict[str, float] = {}
        for name, parameter in net.named_parameters():

            def arrived(p: torch.Tensor, name: str = name, norms: Any = norms) -> None:
                assert name not in norms, f"{name} twice"
                norms[name] = p.grad.norm().item()  # type: ignore[union-attr]

            parameter.register_post_accumulate_grad_hook(arrived)
        job.backward(compiled, 1)
        job.record(f"{when}: norms", {name: norms[name] for name in sorted(norms)})


def module_hooks(job: Job) -> None:
    """Forward hooks that read the weight, and full backward hooks, of a submodule."""
    net = job.net()
    seen: list[float] = []
    net.up.register_forward_hook(lambda m, args, out: out + m.weight.mean())
    net.down.register_full_backward_hook(lambda m, gi, go: None)
    compiled = job.compile(net)
    for step in range(2):
        job.backward(compiled, step)
    job.record("seen", seen)
    job.record_model(net, gradients=True)


def autograd_grad(job: Job) -> None:
    """`torch.autograd.grad` of a compiled loss: the gradients are the averaged ones."""
    net, compiled = _stepped(job)
    grads = torch.autograd.grad(job.loss(compiled), [*net.parameters()])
    job.record("shapes", [[*g.shape] for g in grads])
    job.record("grads", list(grads))


def clipping(job: Job) -> None:
    """`clip_grad_norm_` and `clip_grad_value_`, of all norms and of parts of the model."""
    net, compiled = job.pair()
    clip = nn.utils.clip_grad_norm_
    for i, norm in enumerate((1.0, 2.0, float("inf"))):
        net.zero_grad()
        job.backward(compiled, i)
        total = clip(net.parameters(), 0.05, norm_type=norm)
        job.record(f"total {norm}", float(total))
        job.record_model(net, f"norm {norm}", gradients=True)
    net.zero_grad()
    job.backward(compiled, 3)
    job.record("one tensor", clip(net.up.weight, 0.01).item())
    job.record("not one by one", clip([*net.down.parameters()], 0.01, foreach=False).item())
    nn.utils.clip_grad_value_(net.parameters(), 0.003)
    job.record_model(net, "value", gradients=True)
    job.record("get_total_norm", float(nn.utils.get_total_norm([p.grad for p in net.parameters()])))  # type: ignore[misc]


def noise_on_gradients(job: Job) -> None:
    """Gradients with plain noise added, centred, and normalised by hand."""
    net, compiled = _stepped(job)
    torch.manual_seed(4)
    for p in net.parameters():
        assert p.grad is not None
        p.grad += 0.01 * torch.randn(p.shape)
        p.grad.add_(torch.randn_like(p) * 0.01)
        if p.dim() > 1:
            p.grad.sub_(p.grad.mean(1, keepdim=True))
        p.grad.div_(p.grad.norm() + 1e-6)
    job.record_model(net, gradients=True)
    with torch.no_grad():
        for p in net.parameters():
            p -= 0.1 * p.grad  # type: ignore[operator]
            p.grad.zero_()  # type: ignore[union-attr]
    job.backward(compiled, 1)
    job.record_model(net, "updated by hand")
