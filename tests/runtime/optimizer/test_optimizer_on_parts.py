"""`autoshard.optimizer`: the step on this rank's parts beside the step of stored tensors."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_offloading import CASES
from test_owned_matrices import StackedMuon
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import autoshard
from autoshard.errors import PlanMismatchError
from autoshard.explain.text_costs import update
from autoshard.runtime.optimizer.derived import unhooked_step
from autoshard.runtime.optimizer.stepping import WaysOfSteps
from autoshard.runtime.parameters import optimizers
from autoshard.runtime.parameters.eager.stored_tensor import StoredTensor, as_parameter, as_stored
from autoshard.runtime.parameters.layout import like, wrap_local

Make = Callable[[Any], optim.Optimizer]


class Lion(optim.Optimizer):
    """An optimizer of nobody's list, which counts in its groups and in itself."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "taken": 0})
        self.taken = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.taken += 1
        for group in self.param_groups:
            group["taken"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                average = state.setdefault("average", torch.zeros_like(p))
                p.add_(average.lerp(p.grad, 0.1).sign_(), alpha=-group["lr"] / group["taken"])
                state["average"] = average.lerp(p.grad, 0.01)
                state["count"] = state.get("count", 0) + 1
        return loss


class ScaledBySize(optim.SGD):
    """Elementwise operators, whose number is the parameter's."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad, alpha=-1 / p.shape[0])


class Centred(optim.SGD):
    """A step that takes the mean of several parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = self.param_groups[0]["params"]
        for p in held:
            p.sub_(p.grad * held[0].grad.sum())


class Normed(optim.SGD):
    """A step that reads a parameter whole, without a product."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad / p.grad.norm())


@pytest.fixture(params=[0, 1])
def mesh(request: pytest.FixtureRequest) -> Iterator[DeviceMesh]:
    """Of two ranks, of which this process is one; nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=2)
    yield DeviceMesh("cpu", torch.arange(2), mesh_dim_names=("dp_shard",))
    dist.destroy_process_group()


def parameters(mesh: DeviceMesh) -> list[Any]:
    """One plain and unused; in parts, of one of which a rank has none; whole on each rank."""
    torch.manual_seed(0)
    found: list[Any] = []
    for shape, part in (((8, 3), (4, 3)), ((6,), (3,)), ((1, 3), (1 - mesh.get_rank(), 3))):
        local = wrap_local(torch.randn(part), torch.Size(shape), {"dp_shard": "S(0)"}, mesh)
        found.append(as_parameter(as_stored(local), True))
    for shape in ((), (4, 3)):
        local = wrap_local(torch.randn(shape), torch.Size(shape), {}, mesh)
        found.append(as_parameter(as_stored(local), True))
    return [nn.Parameter(torch.ones(2)), *found]


def backward(held: list[Any], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in held[1:]:
        p.grad = like(p, torch.randn(p.to_local().shape, generator=generator))


def train(held: list[Any], optimizer: Any, steps: range = range(4)) -> None:
    for step in steps:
        backward(held, step)
        optimizer.step()
        optimizer.zero_grad()


def parts(held: list[Any], optimizer: Any) -> list[Any]:
    found = []
    for p in held:
        state = optimizer.state.get(p, {})
        for name, value in [("", p), *state.items()]:
            stored = isinstance(value, StoredTensor)
            found.append((name, value.to_local().detach() if stored else value))
            if isinstance(value, torch.Tensor) and name != "step" and value.dim():
                assert stored == isinstance(p, StoredTensor), name
    return found


def equal(one: list[Any], other: list[Any]) -> bool:
    return [name for name, _ in one] == [name for name, _ in other] and all(
        torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for (_, a), (_, b) in zip(one, other)
    )


def of(optimizer: Any) -> WaysOfSteps:
    return optimizer.__dict__["_autoshard_parts"]  # type: ignore[no-any-return]


ELEMENTWISE: dict[str, Make] = {
    **{
        name: lambda p, c=cls, s=more: c(p, **{"lr": 1e-2, **s})
        for name, (cls, more) in CASES.items()
    },
    "Lion": Lion,
    "SGD foreach": functools.partial(optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "NAdam foreach": lambda p: optim.NAdam(p, foreach=True, decoupled_weight_decay=True),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_parts_and_states_are_those_of_stored_tensors_bit_for_bit(
    name: str, mesh: DeviceMesh
) -> None:
    plain, held = parameters(mesh), parameters(mesh)
    reference, optimizer = ELEMENTWISE[name](plain), ELEMENTWISE[name](held)
    assert autoshard.optimizer(optimizer) is optimizer
    train(plain, reference)
    train(held, optimizer)
    assert len(of(optimizer).lanes) == len(held) and not any(of(optimizer).rest)
    assert equal(parts(held, optimizer), parts(plain, reference))
    for group, want in zip(optimizer.param_groups, reference.param_groups):
        assert {**group, "params": 0} == {**want, "params": 0}
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    for one, its in ((plain, reference), (held, optimizer)):
        its.add_param_group({"params": parameters(mesh)[1], "lr": 1e-3})
        one.append(its.param_groups[1]["params"][0])
        train(one, its, range(4, 6))
    assert equal(parts(held, optimizer), parts(plain, reference))


@pytest.mark.parametrize("name", ["AdamWScheduleFree", "RAdamScheduleFree"])
def test_steps_without_a_schedule_are_those_of_stored_tensors(name: str, mesh: DeviceMesh) -> None:
    make = getattr(pytest.importorskip("schedulefree"), name)
    both = [(one, make(one, lr=1e-2)) for one in (parameters(mesh), parameters(mesh))]
    autoshard.optimizer(both[0][1])
    for mode in ("train", "eval"):
        for held, optimizer in both:
            optimizer.train()
            train(held, optimizer)
            getattr(optimizer, mode)()
        assert equal(parts(*both[0]), parts(*both[1])), mode
    assert of(both[0][1]).on_parts and not any(of(both[0][1]).rest)


def quantized(name: str) -> bool:
    """Whether an optimizer of bitsandbytes moves stored parameters as it moves plain ones."""
    import bitsandbytes

    from autoshard.runtime.mesh import init_mesh

    device_mesh = init_mesh({"dp_shard": 2}, "cpu").device_mesh
    assert device_mesh is not None
    value, gradient = torch.randn(2, 128, 96, generator=torch.Generator().manual_seed(0))

    def stored(whole: torch.Tensor) -> StoredTensor:
        part = whole.chunk(2)[device_mesh.get_local_rank()].clone()
        return as_stored(wrap_local(part, whole.shape, {"dp_shard": "S(0)"}, device_mesh))

    plain, held = nn.Parameter(value.clone()), as_parameter(stored(value), True)
    made = [getattr(bitsandbytes.optim, name)([p], lr=1e-2) for p in (plain, held)]
    autoshard.optimizer(made[1])
    for _ in range(3):
        plain.grad, held.grad = gradient.clone(), stored(gradient)
        for optimizer in made:
            optimizer.step()
    return torch.equal(held.detach().full_tensor(), plain) and not torch.equal(plain, value)  # type: ignore[operator]


@pytest.mark.parametrize("name", ["AdamW8bit", "Lion8bit"])
def test_8_bit_steps_are_those_of_plain_tensors(gloo2: Any, name: str) -> None:
    pytest.importorskip("bitsandbytes")
    assert all(gloo2(quantized, name))


def test_no_stored_tensor_is_dispatched(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    held = parameters(mesh)
    optimizer = autoshard.optimizer(optim.AdamW(held, foreach=True))
    train(held, optimizer)
    backward(held, 5)
    asked: list[Any] = []
    native = StoredTensor.__torch_function__.__func__  # type: ignore[attr-defined]

    def spied(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asked.append(func)
        return native(cls, func, types, args, kwargs)

    monkeypatch.setattr(StoredTensor, "__torch_function__", classmethod(spied))
    optimizer.step()
    assert not asked


def test_what_parts_do_not_suffice_for_says_why(mesh: DeviceMesh) -> None:
    def reason(make: Make) -> str:
        held = parameters(mesh)[1:3]
        optimizer: Any = autoshard.optimizer(make(held))
        found = WaysOfSteps()
        found.follow(optimizer, unhooked_step(optimizer.base), closure=False)
        assert len(found.lanes) == 2 and not found.on_parts
        return found.lanes[0].reason

    assert reason(ScaledBySize) == "its numbers depend on its shape"
    assert reason(Centred) == "mul takes several parameters at once"
    assert reason(optim.Adafactor) == "new_zeros is not elementwise"
    assert reason(optim.LBFGS) == "it has parameters, or more than numbers, in _params"
    assert "its step on fakes raises" in reason(optim.SparseAdam)


def test_explain_says_who_owns_which_matrix(mesh: DeviceMesh) -> None:
    def held(name: str, shape: tuple[int, ...]) -> Any:
        local = torch.ones(shape[0] // 2, *shape[1:])
        made = wrap_local(local, torch.Size(shape), {"dp_shard": "S(0)"}, mesh)
        model.register_parameter(name, as_parameter(as_stored(made), True))

    model = nn.Module()
    for name, shape in {"up": (8, 4), "down": (4, 8), "experts": (4, 4, 6)}.items():
        held(name, shape)
    optimizer = autoshard.optimizer(StackedMuon(model.parameters()))
    lines = update(optimizer, 100).splitlines()
    assert lines[0] == "the optimizer's step: 0 of 3 parameters on each rank's part"
    # of a matrix half there and half back; of each expert nothing
    assert lines[1].startswith("3 by owners, once a mesh: 256 B sent by all ranks, ")
    told = {line.split()[0]: line.split() for line in lines[5:]}
    for name, owner in (("up", "0"), ("down", "1")):
        assert told[name][2:5] == ["8x4" if name == "up" else "4x8", "128", "B"]
        assert told[name][-2:] == ["once", owner]
    assert told["experts"][3:5] == ["0", "B"]
    assert " ".join(told["experts"][6:]) == "each of a stack, once 0-1 by 0, 2-3 by 1"
    plain = autoshard.optimizer(optim.AdamW(model.parameters()))
    assert update(plain, 100) == "the optimizer's step: 3 of 3 parameters on each rank's part"
    assert "autoshard.optimizer" in update(optim.AdamW(model.parameters()), 100)


def test_parameters_that_are_whole_on_each_rank_are_stepped_whole(mesh: DeviceMesh) -> None:
    plain, held = parameters(mesh), parameters(mesh)
    made = [Normed([one[5]]) for one in (plain, held)]
    for one, its in zip((plain, held), (made[0], autoshard.optimizer(made[1]))):
        train(one, its)
    assert of(made[1]).on_parts and equal(parts(held, made[1]), parts(plain, made[0]))


@pytest.mark.parametrize("states", [{"dp_shard": "S(0)"}, {}])
def test_gradients_may_lie_otherwise(states: dict[str, str], mesh: DeviceMesh) -> None:
    """None is sent for what is here: on this mesh nothing would come."""
    (_, plain, *_), (_, held, *_) = parameters(mesh), parameters(mesh)
    whole = torch.randn(8, 3)
    part = whole.chunk(2)[mesh.get_rank()]
    plain.grad, local = like(plain, part.clone()), part if states else whole
    held.grad = as_stored(wrap_local(local.clone(), whole.shape, states, mesh))
    optim.SGD([plain], lr=0.1).step()
    autoshard.optimizer(optim.SGD([held], lr=0.1)).step()
    assert torch.equal(held.detach().to_local(), plain.detach().to_local())


@pytest.mark.parametrize("order", ["host first", "host last"])
def test_the_host_steps_parts_in_either_order(order: str, mesh: DeviceMesh) -> None:
    plain, held = parameters(mesh), parameters(mesh)
    reference, optimizer = (optim.AdamW(one, lr=1e-2) for one in (plain, held))
    ways: list[Any] = [autoshard.offload_optimizer, autoshard.optimizer]
    first, last = ways if order == "host first" else ways[::-1]
    first(optimizer)
    train(plain, reference, range(2))
    train(held, optimizer, range(2))
    assert last(optimizer) is optimizer
    train(plain, reference, range(2, 4))
    train(held, optimizer, range(2, 4))
    assert "_staging" in optimizer.__dict__ and "_autoshard_parts" not in optimizer.__dict__
    assert equal(parts(held, optimizer), parts(plain, reference))


def disagreeing(change: str) -> str:
    """The error of ranks of which the last steps otherwise."""
    from autoshard.runtime.mesh import init_mesh

    rank = int(os.environ["RANK"])
    device_mesh = init_mesh({"dp_shard": 2}, "cpu").device_mesh
    assert device_mesh is not None
    held = parameters(device_mesh)[1:]
    backward([None, *held], 0)
    make: Any = optim.Adafactor if change == "class" and rank else optim.SGD
    given = held[::-1] if change == "order" and rank else held
    optimizer = autoshard.optimizer(make(given, lr=0.1))
    # Adafactor asks for their order before, in a process in which a model was stored
    asked = mock.patch.object(optimizers, "_agree_on_order")
    with asked, pytest.raises(PlanMismatchError) as error:
        optimizer.step()
    return str(error.value)


@pytest.mark.parametrize("change", ["class", "order"])
def test_ranks_that_sort_their_parameters_differently_are_an_error(gloo2: Any, change: str) -> None:
    one, other = gloo2(disagreeing, change)
    first = "rank 0: SGD, parameter 0 (group 0, (8, 3)): elementwise; rank 1: "
    said = {
        "class": "Adafactor, parameter 0 (group 0, (8, 3)): new_zeros is not elementwise",
        "order": "SGD, parameter 0 (group 0, (4, 3))",
    }
    assert one == other and first + said[change] in one, (one, other)
