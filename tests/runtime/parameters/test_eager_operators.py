"""What eager code does with stored tensors, each beside the plain model: values and results."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.runtime.mesh import init_mesh
from autoshard.runtime.parameters.shard import shard_parameters
from gloo_pool import GlooPool

Case = Callable[[nn.Sequential], Any]
ROWS = 15  # which two ranks do not divide


def models(axis: str, count: int) -> list[tuple[nn.Sequential, nn.Sequential]]:
    """Models stored by rows, by columns and, on dp_replicate, whole; each with itself as it was.

    Stored by one call: each looks at all objects of a process, which takes seconds.
    """
    pairs, states = [], {}
    for _ in range(count):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, ROWS), nn.GELU(), nn.Linear(ROWS, 4))
        pairs.append((model, copy.deepcopy(model)))
        first, last = model[0], model[2]
        states |= {first.weight: "S(0)", first.bias: "S(0)", last.weight: "S(1)", last.bias: "S(0)"}
    if axis == "dp_replicate":
        states = dict.fromkeys(states, "I")
    mesh = init_mesh({axis: 2}, "cpu")
    shard_parameters({p: {axis: state} for p, state in states.items()}, mesh, broadcast=True)
    return pairs


def batch() -> torch.Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(1))


def trained(make: Callable[..., torch.optim.Optimizer], **options: Any) -> Case:
    def run(model: nn.Sequential) -> list[torch.Tensor]:
        optimizer = make([p for p in model.parameters() if p.dim() > 1], lr=0.1, **options)
        seen = []
        for _ in range(3):
            penalty = sum(p.square().sum() for p in model.parameters())
            loss = model(batch()).square().mean() + 0.01 * penalty
            loss.backward()
            seen += [loss, nn.utils.clip_grad_norm_(model.parameters(), 0.5)]
            optimizer.step()
            model.zero_grad()
        return seen

    return run


def lbfgs(model: nn.Sequential) -> None:
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch()).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)


def sharpness_aware(model: nn.Sequential) -> list[Any]:
    model(batch()).square().mean().backward()
    with torch.no_grad():
        norm = torch.norm(torch.stack([p.grad.norm(p=2) for p in model.parameters()]), p=2)
        before = [p.data.clone() for p in model.parameters()]
        for p in model.parameters():
            p.add_(p.grad * (0.05 / (norm + 1e-12)))
    model.zero_grad()
    model(batch()).square().mean().backward()
    for p, values in zip(model.parameters(), before):
        p.data = values
    return [norm, *(p.grad for p in model.parameters())]


def averaged_into_a_plain_copy(model: nn.Sequential) -> list[Any]:
    torch.manual_seed(0)
    average = nn.Sequential(nn.Linear(8, ROWS), nn.GELU(), nn.Linear(ROWS, 4))
    for mean, p in zip(average.parameters(), model.parameters()):
        mean.data.mul_(0.9).add_(p.data, alpha=0.1)
    with torch.no_grad():
        torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.3)
    return list(average.parameters())


def hooked(model: nn.Sequential) -> list[Any]:
    seen: list[float] = []
    model[0].weight.register_hook(lambda grad: seen.append(grad.norm().item()))
    model(batch()).sum().backward()
    return [*seen, model[0].weight.grad.norm().item()]


def refused(write: Callable[[nn.Sequential], Any]) -> Case:
    def run(model: nn.Sequential) -> str:
        with pytest.raises(RuntimeError) as error:
            write(model)
        return str(error.value)[:20]

    return run


def views(model: nn.Sequential) -> None:
    row = model[0].weight.data[1]
    row.add_(1)
    model[0].weight.data.mul_(3)  # the view sees it
    row[0].add_(5)
    model[0].weight.data.T[1].fill_(2.0)
    model[0].weight.data.view(-1)[3:7].mul_(2.0)
    nn.init.zeros_(model[2].weight[0])  # of a leaf that requires grad


def swapped(model: nn.Sequential) -> None:
    kept = model[0].weight.data
    model[0].weight.data = torch.zeros(ROWS, 8)
    model[0].weight.data = kept


def files(model: nn.Sequential) -> list[Any]:
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    assert not any(isinstance(value, DTensor) for value in loaded.values())
    model.load_state_dict({name: 2 * value for name, value in loaded.items()})
    again = pickle.loads(pickle.dumps(model))
    assert type(again[0]) is nn.Linear and type(again[0].weight) is nn.Parameter
    return [*again.parameters(), *copy.deepcopy(model).parameters()]


def sums_written_to(model: nn.Sequential) -> list[Any]:
    """Norms, means and extremes, of which each rank has its share until something looks at them."""
    model(batch()).square().mean().backward()
    grad, found = model[2].bias.grad, []
    sums = (torch.norm, torch.mean, torch.sum, torch.amax, torch.min, lambda g: g.norm(p=1))
    writes: tuple[Callable[[torch.Tensor], Any], ...] = (
        lambda n: n.clamp_(min=0.01).mul_(0.5),
        lambda n: n.add_(1e-2),
        lambda n: n.copy_(torch.tensor(2.0)),
        lambda n: n.__setitem__(..., 3.0),
        lambda n: n.view(1).mul_(2),
        lambda n: n.data.add_(1),
        lambda n: n.masked_fill_(torch.tensor(True), 4.0),
        lambda n: torch.add(n, 1, out=n),
        lambda n: setattr(n, "data", torch.tensor(5.0)),
        lambda n: found.append(torch.rand_like(n) * 0),
        lambda n: torch._foreach_add_([n, n.clone()], 1.0),
        lambda n: found.extend(torch._foreach_add([n, grad.norm()], [grad.max(), n])),
        lambda n: grad.mul_(n.clamp_(max=1.0)),
    )
    for total in sums:
        for write in writes:
            found.append(total(grad))
            write(found[-1])
    norms = list(torch._foreach_norm([p.grad for p in model.parameters()]))
    torch._foreach_clamp_min_(norms, 0.1)
    return [*found, *norms, *torch._foreach_mul(norms, 2.0), copy.deepcopy(grad.norm())]


def initialised(model: nn.Sequential) -> None:
    first, last = model[0], model[2]
    nn.init.xavier_uniform_(first.weight)
    nn.init.kaiming_uniform_(last.weight)
    nn.init.trunc_normal_(first.bias)
    last.bias.data.uniform_()
    model.register_buffer("noise", torch.randn(3))  # the generator is where serial's is
    nn.init.orthogonal_(first.weight)
    nn.init.eye_(last.weight)
    nn.init.sparse_(first.weight, 0.3)
    first.reset_parameters()
    first.weight.data.add_(torch.randn_like(first.weight))


_OPERATORS = torch.library.Library("autoshard_tests", "DEF")
_OPERATORS.define("step(Tensor g, Tensor(a!) p, float lr, *, Tensor(b!)? average=None) -> ()")


def _step(g: torch.Tensor, p: torch.Tensor, lr: float, *, average: torch.Tensor) -> None:
    p.sub_(average.lerp_(g, 0.5) * lr)


_OPERATORS.impl("step", _step, "CompositeExplicitAutograd")


def library_step(model: nn.Sequential) -> torch.Tensor:
    """A library's operator that writes to its operands, as the steps of bitsandbytes do."""
    model(batch()).square().mean().backward()
    weight = model[0].weight
    average = torch.zeros_like(weight.data)
    torch.ops.autoshard_tests.step(weight.grad, weight.data, 0.1, average=average)
    return average


CASES: dict[str, Case] = {
    "forward": lambda m: m(batch()),
    "AdamW": trained(torch.optim.AdamW),
    "AdamW foreach": trained(torch.optim.AdamW, foreach=True),
    "AdamW fused": trained(torch.optim.AdamW, fused=True),
    "Adamax": trained(torch.optim.Adamax),  # writes with out=
    "Rprop": trained(torch.optim.Rprop),
    "Adafactor": trained(torch.optim.Adafactor),
    "SGD": trained(torch.optim.SGD, momentum=0.9, foreach=True),
    "Muon": lambda m: trained(torch.optim.Muon)(m),  # since torch 2.9
    "L-BFGS": lbfgs,
    "SAM": sharpness_aware,
    "average": averaged_into_a_plain_copy,
    "hook": hooked,
    "views": views,
    "data swapped": swapped,
    "files": files,
    "sums written to": sums_written_to,
    "init": initialised,
    "a library's step": library_step,
    "leaf": refused(lambda m: m[0].weight.mul_(2)),
    "view of a leaf": refused(lambda m: m[0].weight[0].mul_(2)),
    "writes": lambda m: (
        m[0].weight.data.add_(torch.ones(ROWS, 8)),
        m[0].weight.data.__setitem__(0, 7.0),
        m[0].weight.data.copy_(torch.arange(ROWS * 8.0).view(8, ROWS).T),
        m[0].weight.data.masked_fill_(torch.eye(ROWS, 8).bool(), 0.0),
        m[0].weight.data.index_add_(0, torch.tensor([1, 2]), torch.ones(2, 8)),
        m[2].weight.data.clamp_(-0.1, 0.1),
    ),
    "reads": lambda m: [
        *(m[0].weight.norm().item(), float(m[2].bias.norm()), m[0].weight.norm(p=1).item()),
        *(m[0].weight.sum().item(), m[0].weight.mean().item(), m[0].weight.std().item()),
        *(m[0].weight.data.abs().max().item(), m[0].weight.min().item()),
        *(m[0].weight[1, 2].item(), f"{m[0].weight.norm():.3f}", m[2].bias.tolist()[0]),
        *(bool((m[0].weight == m[0].weight).all()), bool(torch.isnan(m[0].weight).any())),
        torch.tensor(m[0].weight.detach().numpy()),
        torch.stack([p.norm() for p in m.parameters()]),
    ],
    "mathematics": lambda m: [
        torch.einsum("ij,kj->ik", m[0].weight, batch()),
        m[0].weight @ batch().T,
        batch() @ m[0].weight.T,
        torch.cat([m[0].weight, batch()]),
        m[0].weight.unsqueeze(0).expand(2, -1, -1).sum(),
        F.cosine_similarity(m[0].weight.view(-1), m[0].weight.flatten() * 2 + 1, dim=0),
    ],
    "gradients": lambda m: [
        *torch.autograd.grad(m(batch()).sum(), list(m.parameters())),
        torch.stack([m[2].bias, m[2].bias]),  # nothing of them is to be reduced
        *torch.autograd.grad((m[0].weight[0] * batch()[0]).sum(), [m[0].weight]),
        *torch.autograd.grad(sum(p.abs().sum() for p in m.parameters()), list(m.parameters())),
    ],
    "vector": lambda m: nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(m.parameters()) * 1.1, m.parameters()
    ),
}


def compare(axis: str, names: list[str]) -> list[str]:
    """The cases that differ from the plain model, on this rank."""
    wrong = []
    for name, (model, serial) in zip(names, models(axis, len(names)), strict=True):
        found = []
        for each in (model, serial):
            torch.manual_seed(3)
            found.append([CASES[name](each), *each.parameters()])
        flat = [torch.utils._pytree.tree_leaves(each) for each in found]
        for ours, theirs in zip(*flat, strict=True):
            if isinstance(theirs, torch.Tensor):
                whole = ours.full_tensor() if isinstance(ours, DTensor) else ours
                tolerance = 1e-2 if name == "Muon" else 1e-5  # it computes in bfloat16
                same = torch.allclose(whole, theirs, atol=tolerance, rtol=tolerance)
            elif isinstance(theirs, float):
                same = ours == pytest.approx(theirs, rel=1e-5)
            else:
                same = ours == theirs
            if not same:
                wrong.append(name)
                break
    return wrong


@pytest.mark.parametrize(
    "axis",
    [
        pytest.param("tp", marks=pytest.mark.slow),
        pytest.param("dp_shard", marks=pytest.mark.slow),
        "dp_replicate",
    ],
)
def test_eager_code_sees_the_tensor_it_stands_for(gloo2: GlooPool, axis: str) -> None:
    names = [n for n in CASES if n != "Muon" or hasattr(torch.optim, "Muon")]
    if axis == "dp_replicate":  # every rank whole: what the others do not ask
        names = ["AdamW foreach", "hook", "views", "init", "gradients"]
    assert gloo2(compare, axis, names) == [[], []]
