"""Matrices that one rank steps: beside one device with the same gradients, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree

import autoshard
from autoshard.runtime.mesh import init_mesh
from autoshard.runtime.optimizer.matrix_steps import MatrixStep, Rows
from autoshard.runtime.optimizer.owned_steps import run_all
from autoshard.runtime.parameters import local_part, stored_states, wrap_local
from autoshard.runtime.parameters.eager.stored_tensor import as_parameter, as_stored
from joined_batch import Sizes

SHAPES = [(9, 4), (4, 12), (6, 6), (1, 5)]


class Preconditioned(optim.Optimizer):
    """Shampoo's matrices of rows and columns, in a list, renewed every second step."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["statistics"] = [torch.eye(n) * 1e-3 for n in p.shape]
                    state["roots"] = [torch.eye(n) for n in p.shape]
                    state["rotated"] = torch.zeros_like(p)
                state["step"] += 1
                rows, columns = state["statistics"]
                rows.add_(p.grad @ p.grad.T)
                columns.add_(p.grad.T @ p.grad)
                if state["step"] % 2:
                    for number, x in enumerate((rows, columns)):
                        values, vectors = torch.linalg.eigh(x)
                        state["roots"][number] = (vectors * values**-0.25) @ vectors.T
                state["rotated"].lerp_(state["roots"][0] @ p.grad, 0.5)
                p.sub_(state["rotated"] @ state["roots"][1], alpha=group["lr"])


class StackedMuon(optim.Optimizer):
    """Muon as it is published for stacks too: torch's takes matrices alone. Newton-Schulz of the
    last two dims, all matrices of a stack at once."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.95})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 1 - group["momentum"])
                x = p.grad.lerp(momentum, group["momentum"])
                x = x.mT if x.size(-2) > x.size(-1) else x
                x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
                for _ in range(5):
                    gram = x @ x.mT
                    x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
                x = x.mT if p.size(-2) > p.size(-1) else x
                p.add_(x, alpha=-group["lr"] * max(1, p.size(-2) / p.size(-1)) ** 0.5)


def stored(whole: torch.Tensor, states: Any, mesh: Any) -> Any:
    part = local_part(whole, states, mesh.axes).clone()
    return as_parameter(as_stored(wrap_local(part, whole.shape, states, mesh.device_mesh)), True)


def beside_one_device(
    sizes: Sizes,
    placed: list[dict[str, str]],
    cls: Any,
    settings: list[dict[str, Any]],
    within: float = 0.0,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
) -> list[Any]:
    """Steps on a mesh, and on one device, of the same parameters and gradients."""
    mesh = init_mesh(sizes, "cpu")
    found = []
    for chosen in settings:
        draw = torch.Generator().manual_seed(0)
        alone = [nn.Parameter(torch.randn(s, generator=draw)) for s in shapes for _ in placed]
        each = [states for _ in shapes for states in placed]
        held = [stored(p.detach(), states, mesh) for p, states in zip(alone, each)]
        optimizer, serial = autoshard.optimizer(cls(held, **chosen)), cls(alone, **chosen)
        for _ in range(3):
            for p, q in zip(held, alone):
                q.grad = torch.randn(q.shape, generator=draw)
                p.grad = stored(q.grad, stored_states(p), mesh)
            optimizer.step()
            serial.step()
        ways = optimizer.__dict__["_autoshard_parts"]
        matrices = ways.owned
        assert len(matrices) == len(held)
        for p, q in zip(held, alone):
            torch.testing.assert_close(p.detach().full_tensor(), q.detach(), rtol=0, atol=within)
            whole = pytree.tree_map_only(type(p), lambda x: x.full_tensor(), optimizer.state[p])
            torch.testing.assert_close(whole, serial.state[q], rtol=0, atol=within)
        sent = ways.owned_steps.sent, sum(m.nbytes() for m in matrices)
        found.append(([(m.rows, m.sharers.own, m.work) for m in matrices], *sent))
    return found


MUON: list[dict[str, Any]] = [
    {"lr": 0.05},
    {"lr": 0.05, "nesterov": False, "weight_decay": 0.3, "adjust_lr_fn": "match_rms_adamw"},
]
TWO = [
    ({"dp_shard": 2}, [{"dp_shard": "S(0)"}]),
    ({"tp": 2}, [{"tp": "S(0)"}, {"tp": "S(1)"}, {"tp": "I"}]),
    ({"dp_replicate": 2}, [{}]),
    ({"pp": 2}, [{"pp": "H(0)"}, {"pp": "H(1)"}]),
]

FOUR = [
    (
        {"dp_shard": 2, "tp": 2},
        [{"dp_shard": "S(0)", "tp": "S(0)"}, {"dp_shard": "S(0)", "tp": "S(1)"}],
    ),
    ({"dp_replicate": 2, "tp": 2}, [{"tp": "S(1)"}, {"tp": "S(0)"}]),
    ({"pp": 2, "dp_shard": 2}, [{"pp": "H(0)", "dp_shard": "S(0)"}, {"pp": "H(1)"}]),
]


@pytest.mark.parametrize(("sizes", "placed"), TWO)
def test_steps_on_two_ranks_are_those_of_one_device(gloo2: Any, sizes: Sizes, placed: Any) -> None:
    found = gloo2(beside_one_device, sizes, placed, optim.Muon, MUON)
    for sent in zip(*found):  # of the ranks, with each choice of settings
        if "pp" not in sizes:  # whose matrices are sent among their holders alone, without a byte
            assert sum(one[1] for one in sent) == sent[0][2] > 0
    gloo2(beside_one_device, sizes, placed, Preconditioned, [{"lr": 0.05}])


STACKS = [(4, 6, 5), (3, 4, 8), (1, 5, 5)]


@pytest.mark.parametrize(
    ("sizes", "placed"),
    [
        ({"ep": 2}, [{"ep": "S(0)"}]),
        ({"tp": 2}, [{"tp": "S(1)"}, {"tp": "S(2)"}, {"tp": "I"}]),
    ],
)
def test_stacks_of_experts(gloo2: Any, sizes: Sizes, placed: Any) -> None:
    shapes = [shape for shape in STACKS for _ in placed]
    found = gloo2(beside_one_device, sizes, placed, StackedMuon, [{}], 1e-6, STACKS)
    assert sum(sent for [(_, sent, _)] in found) == found[0][0][2]
    assert (found[0][0][2] == 0) == ("ep" in sizes)  # each by those that hold it
    for rank, [(matrices, *_)] in enumerate(found):
        for (rows, own, work), (count, *_) in zip(matrices, shapes):
            assert work.by_rows and own == rank and work.sent == work.returned
            each = [high - low for low, high in rows]
            assert sorted(each) == [count // 2, -(-count // 2)]
            assert "ep" not in sizes or each == [-(-count // 2), count // 2]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("cls", [optim.Muon, Preconditioned, StackedMuon])
def test_what_an_owner_steps_is_what_one_device_steps(rank: int, cls: Any) -> None:
    """Of copies nothing travels to an owner: it is right where nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    try:
        mesh = init_mesh({"dp_replicate": 2}, "cpu")
        shapes: Any = STACKS if cls is StackedMuon else SHAPES
        alone = [nn.Parameter(torch.randn(shape)) for shape in shapes]
        held = [stored(p.detach(), {}, mesh) for p in alone]
        optimizer, serial = autoshard.optimizer(cls(held, lr=0.05)), cls(alone, lr=0.05)
        for _ in range(3):
            for p, q in zip(held, alone):
                q.grad = torch.randn(q.shape)
                p.grad = stored(q.grad, {}, mesh)
            optimizer.step()
            serial.step()
        matrices, stepped = optimizer.__dict__["_autoshard_parts"].owned, 0
        assert len(matrices) == len(held)
        for matrix, p, q in zip(matrices, held, alone):
            low, high = matrix.rows[rank]
            stepped += high > low
            if high > low:
                mine = pytree.tree_leaves((p, optimizer.state[p]))
                theirs = pytree.tree_leaves((q, serial.state[q]))
                for one, other in zip(mine, theirs, strict=True):
                    local = one.to_local() if hasattr(one, "to_local") else torch.as_tensor(one)
                    whole, rows = torch.as_tensor(other), slice(low, high)
                    both = (local, whole) if whole.shape != q.shape else (local[rows], whole[rows])
                    torch.testing.assert_close(*both, rtol=0, atol=1e-6 * (cls is StackedMuon))
        assert stepped
    finally:
        dist.destroy_process_group()


#: Steps of a stack (a cube: no size tells one dim from another) of which each matrix is by itself;
#: and those of which it is not.
BY_ROWS: dict[str, Callable[[Any, Any], Any]] = {
    "products": lambda p, g: p.sub_(g @ g.mT @ g),
    "of each": lambda p, g: p.sub_(g @ g / g.norm(dim=(-2, -1), keepdim=True)),
    "of each column": lambda p, g: p.sub_(g @ g / (1 + g.abs().sum(dim=1, keepdim=True))),
    "eigenvectors": lambda p, g: p.sub_(torch.linalg.eigh(g @ g.mT).eigenvectors),
    "permuted": lambda p, g: p.sub_(g @ g.permute(-3, -1, -2)),
    "transposed": lambda p, g: p.sub_(g @ g.transpose(1, -1)),
    "identities": lambda p, g: p.sub_(g @ g + torch.eye(4).expand(4, 4, 4)),
    "like it": lambda p, g: p.sub_(g @ (g @ g + g.new_ones(4, 4, 4))),
    "made": lambda p, g: p.sub_(g @ torch.full((4, 4, 4), 2.0)),
    "one for all": lambda p, g: p.sub_(g @ g * torch.ones(1, 4, 4).cumsum(2)),
    "of the last dim": lambda p, g: p.sub_(g @ g * torch.arange(4.0)),
}
TOGETHER: dict[str, Callable[[Any, Any], Any]] = {
    "a norm over it": lambda p, g: p.sub_(g @ g / g.norm(dim=-3, keepdim=True)),
    "a sum over it": lambda p, g: p.sub_(g @ g * g.sum(dim=-3).view(4, 1, 4)),
    "a sum over it and more": lambda p, g: p.sub_(g @ g * g.sum(dim=(0, 1)).view(4, 1, 1)),
    "a mean of all": lambda p, g: p.sub_(g @ g * g.mean()),
    "permuted": lambda p, g: p.sub_(g @ g.permute(1, 0, 2)),
    "permuted from behind": lambda p, g: p.sub_(g @ g.permute(-1, -2, -3)),
    "transposed": lambda p, g: p.sub_(g @ g.transpose(-3, -1)),
    "the first": lambda p, g: p.sub_(g @ g[0]),
    "one after another": lambda p, g: p.sub_((g @ g).cumsum(0)),
    "a dim before it": lambda p, g: p.sub_(g @ g * g.sum(dim=(1, 2)).expand(4, 4)),
    "repeated": lambda p, g: p.sub_(g @ torch.eye(4).repeat(4, 1, 1)),
    "its numbers": lambda p, g: p.sub_(g @ g * torch.arange(4.0).view(4, 1, 1)),
    "its numbers, in full": lambda p, g: p.sub_(g @ torch.arange(64.0).view(4, 4, 4)),
    "all rows at once": lambda p, g: p.sub_(g @ torch.eye(4)),
    "a state": lambda p, g: (p.sub_(g @ g), torch.eye(4).repeat(4, 1, 1))[1],
    "a number": lambda p, g: (p.sub_(g @ g), g.sum(dim=(1, 2)))[1],
    "a matrix": lambda p, g: p.sub_(torch.linalg.eigh(g).eigenvectors),
}
STACK_OF = {"products": (3, 4, 4), "not: a number": (1, 4, 4), "not: a matrix": (4, 4)}


@pytest.mark.parametrize("name", [*BY_ROWS, *(f"not: {one}" for one in TOGETHER)])
def test_a_stack_is_stepped_by_the_matrix_where_each_is_by_itself(name: str) -> None:
    step = BY_ROWS[name] if name in BY_ROWS else TOGETHER[name.removeprefix("not: ")]
    p, g = torch.randn(2, *STACK_OF.get(name, (4, 4, 4)))
    run = MatrixStep(p.shape, p.device)
    values = run.value(p.shape, p.dtype), run.value(g.shape, g.dtype)
    with run:
        kept = step(*values)
    division = run.divide([kept], values[:1])
    assert division.is_by_rows(p.shape) == (name in BY_ROWS)

    def stepped(a: int, b: int, rows: Rows | None) -> torch.Tensor:
        known = dict(zip(map(id, values), (p[a:b].clone(), g[a:b])))
        run_all(division.before, known)
        run_all(division.at_owner, known, {id(values[0]), *map(id, division.returned)}, rows)
        run_all(division.after, known)
        return known[id(values[0])]

    found, count = stepped(0, len(p), None), len(p)
    if name in BY_ROWS:
        parts = [stepped(a, b, Rows(b - a, count)) for a, b in ((0, 1), (1, count))]
        assert torch.equal(torch.cat(parts), found)
    step(p, g)
    assert torch.equal(found, p)


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "placed"), TWO[:1])
def test_soap_of_a_package(gloo2: Any, sizes: Sizes, placed: Any) -> None:
    soap = pytest.importorskip("pytorch_optimizer").SOAP
    chosen = {"lr": 0.05, "precondition_frequency": 2}
    # LAPACK's factors are columns on one device, and rows where a state is stored
    gloo2(beside_one_device, sizes, placed, soap, [chosen], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "placed"), FOUR)
def test_steps_on_four_ranks_are_those_of_one_device(gloo4: Any, sizes: Sizes, placed: Any) -> None:
    gloo4(beside_one_device, sizes, placed, optim.Muon, MUON)
    gloo4(beside_one_device, sizes, placed, Preconditioned, [{"lr": 0.05}])
