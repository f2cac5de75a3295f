"""`autoshard.offload_optimizer`: the numbers of the optimizer it is given, bit for bit."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import autoshard
from autoshard.errors import AutoshardError
from autoshard.runtime import host_memory
from autoshard.runtime.host_memory import Copies
from autoshard.runtime.optimizer import offloaded
from autoshard.runtime.parameters.eager import gathering
from autoshard.runtime.parameters.eager.stored_tensor import (
    StoredTensor,
    as_parameter,
    as_stored,
)
from autoshard.runtime.parameters.layout import like, wrap_local

CASES: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (optim.AdamW, {}),
    "AdamW fused": (optim.AdamW, {"fused": True}),
    "AdamW foreach": (optim.AdamW, {"foreach": True, "maximize": True}),
    "Adam amsgrad": (optim.Adam, {"amsgrad": True}),
    "SGD momentum": (optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "SGD fused": (optim.SGD, {"momentum": 0.9, "fused": True}),
    "NAdam": (optim.NAdam, {}),
    "ASGD": (optim.ASGD, {}),
    "Rprop": (optim.Rprop, {}),
    "RMSprop": (optim.RMSprop, {"centered": True, "momentum": 0.5}),
    "Adagrad": (optim.Adagrad, {}),
    "Adagrad fused": (optim.Adagrad, {"fused": True}),
    "Adadelta": (optim.Adadelta, {}),
    "Adamax": (optim.Adamax, {}),
    "RAdam": (optim.RAdam, {}),
}


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Five parameters, more than there are buffers, one of them a scalar, and one never used."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(7, 13), nn.GELU(), nn.LayerNorm(13), nn.Linear(13, 3)).to(dtype)
    made.scale = nn.Parameter(torch.tensor(0.5, dtype=dtype))
    made.unused = nn.Parameter(torch.ones(3, dtype=dtype))
    return made


def backward(model: Any, step: int) -> None:
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(step))
    (model(x.to(model.scale.dtype)) * model.scale.exp()).square().sum().backward()


def train(model: nn.Module, optimizer: optim.Optimizer, steps: range = range(4)) -> None:
    for step in steps:
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.parameters(), other.parameters()))


@pytest.mark.parametrize("name", CASES)
def test_numbers_and_states_are_those_of_the_optimizer(name: str) -> None:
    cls, settings = CASES[name]
    plain, model = net(), net()
    reference = cls(plain.parameters(), lr=1e-2, **settings)  # type: ignore[call-arg]
    optimizer = cls(model.parameters(), lr=1e-2, **settings)  # type: ignore[call-arg]
    assert autoshard.offload_optimizer(optimizer) is optimizer and isinstance(optimizer, cls)
    train(plain, reference)
    train(model, optimizer)
    assert same(model, plain)
    want = reference.state_dict()["state"]
    for number, state in optimizer.state_dict()["state"].items():
        assert [*state] == [*want[number]]
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(want[number][key])), key


@pytest.mark.skipif(
    torch.__version__ >= "2.14",
    reason="torch 2.14 asks how many devices a host of the mesh has; of meta none",
)
def test_states_of_a_parameter_on_another_device_stay_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a mesh of meta devices: parts on the host, which are gathered on the mesh's device."""

    class Nothing(Copies):
        def read(self, *_: Any) -> None: ...
        def write(self, *_: Any) -> None: ...

    empty, gathered = torch.empty, []
    monkeypatch.setattr(host_memory, "StreamCopies", lambda device: Nothing())
    monkeypatch.setattr(
        torch, "empty", lambda *sizes, pin_memory=False, **more: empty(*sizes, **more)
    )
    whole = gathering.unshard_parameter

    def spied(x: Any, *more: Any) -> torch.Tensor:
        gathered.append(x.to_local().device.type)
        return whole(x, *more)

    monkeypatch.setattr(gathering, "unshard_parameter", spied)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        mesh = DeviceMesh("meta", torch.arange(2), mesh_dim_names=("dp_shard",))
        states: Any = {"dp_shard": "S(0)"}
        part = wrap_local(torch.empty(4, 3, device="meta"), torch.Size((8, 3)), states, mesh)
        p: Any = as_parameter(as_stored(part), True)
        p.grad = like(p, torch.empty(4, 3, device="meta"))
        optimizer = autoshard.offload_optimizer(optim.AdamW([p]), master_dtype=torch.float64)
        for _ in range(2):
            optimizer.step()
            state = optimizer.state[p]
            kinds = {key: type(value) for key, value in state.items()}
            assert kinds.pop("step") is torch.Tensor and set(kinds.values()) == {StoredTensor}
            assert {value.to_local().device.type for value in state.values() if value.dim()} == {
                "cpu"
            }
            assert set(kinds) == {"exp_avg", "exp_avg_sq", "master"}
            optimizer.load_state_dict(optimizer.state_dict())
        saved = optimizer.state_dict()
        saved["state"][0]["exp_avg"] = torch.arange(24.0).view(8, 3)
        optimizer.load_state_dict(saved)
        loaded: Any = optimizer.state[p]["exp_avg"]
        assert torch.equal(loaded.to_local(), torch.arange(12.0, 24.0).double().view(4, 3))
        assert autoshard.full_state_dict(optimizer) == {} and gathered == ["meta"] * 3
    finally:
        dist.destroy_process_group()


def test_the_fused_step_runs_beside_a_gpu_unless_another_is_asked_for() -> None:
    def settings(device: str, **asked: Any) -> Any:
        group = optim.AdamW(net().parameters(), **asked).param_groups[0]
        parameter = torch.empty(3, device=device)
        return offloaded._settings(optim.AdamW, group, parameter).get("fused")

    assert settings("meta") is True and settings("cpu") is None
    assert settings("meta", foreach=True) is None and settings("meta", fused=False) is False


def stepped_in_float32(model: nn.Module, steps: range) -> dict[str, torch.Tensor]:
    """What the parameters of a bfloat16 model are after steps of float32 copies."""
    copies = {name: nn.Parameter(p.detach().float()) for name, p in model.named_parameters()}
    optimizer = optim.AdamW(copies.values(), lr=1e-2)
    for step in steps:
        backward(model, step)
        with torch.no_grad():
            for name, p in model.named_parameters():
                copies[name].grad = None if p.grad is None else p.grad.float()
            optimizer.step()
            for name, p in model.named_parameters():
                p.copy_(copies[name])
                p.grad = None
    return {name: copy.detach() for name, copy in copies.items()}


def test_copies_in_float32() -> None:
    plain, model = net(torch.bfloat16), net(torch.bfloat16)
    given = optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = autoshard.offload_optimizer(given, master_dtype=torch.float32)
    want = stepped_in_float32(plain, range(6))
    train(model, optimizer, range(3))

    other = net(torch.bfloat16)
    other.load_state_dict(model.state_dict())
    again = optim.AdamW(other.parameters(), lr=1e-2)
    again = autoshard.offload_optimizer(again, master_dtype=torch.float32)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, its in ((model, optimizer), (other, again)):
        train(one, its, range(3, 6))
        for name, p in one.named_parameters():
            state = its.state[p]
            assert torch.equal(p, want[name].bfloat16())
            if name != "unused":
                assert torch.equal(state["master"], want[name])
                assert state["exp_avg"].dtype == torch.float32


def test_of_a_parameter_that_was_written_the_copy_keeps_the_other_elements() -> None:
    model = net(torch.bfloat16)
    optimizer = optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    optimizer = autoshard.offload_optimizer(optimizer, master_dtype=torch.float32)
    train(model, optimizer, range(1))
    weight: Any = model[0].weight  # type: ignore[index]
    fine = weight.detach().float() + 1e-6
    optimizer.state[weight]["master"] = fine.clone()
    weight.data[2] = 7.0
    train(model, optimizer, range(1))
    fine[2] = 7.0
    assert torch.equal(optimizer.state[weight]["master"], fine)
    assert torch.equal(weight, fine.bfloat16())


def test_what_is_written_between_steps_is_stepped() -> None:
    plain, model = net(), net()
    pairs = [(plain, optim.AdamW(plain.parameters()))]
    pairs += [(model, autoshard.offload_optimizer(optim.AdamW(model.parameters())))]
    for one, optimizer in pairs:
        train(one, optimizer)
        for p in one.parameters():
            p.data.mul_(0.5)  # no version counter knows of it
        train(one, optimizer)
    assert same(model, plain)


def test_a_graph_that_was_recorded_before_the_step_is_refused() -> None:
    model = net()
    optimizer = autoshard.offload_optimizer(optim.SGD(model.parameters(), lr=0.1))
    backward(model, 0)
    loss = (model.scale * model.scale.exp()).sum()  # type: ignore[operator, union-attr]
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_copied_and_pickled() -> None:
    plain, model = net(), net()
    reference = optim.AdamW(plain.parameters())
    both = {"model": model, "optimizer": optim.AdamW(model.parameters())}
    autoshard.offload_optimizer(both["optimizer"])  # type: ignore[type-var]
    train(plain, reference)
    train(model, both["optimizer"])  # type: ignore[arg-type]
    file = io.BytesIO()
    torch.save(both, file)
    file.seek(0)
    train(plain, reference)
    for again in (copy.deepcopy(both), torch.load(file, weights_only=False)):
        train(again["model"], again["optimizer"])
        assert same(again["model"], plain)


def test_a_closure_and_an_optimizer_for_each_parameter() -> None:
    plain, model = net(), net()
    train(plain, optim.AdamW(plain.parameters()), range(1))
    each = {p: autoshard.offload_optimizer(optim.AdamW([p])) for p in model.parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: each[p].step())  # type: ignore[index]
    backward(model, 0)
    assert same(model, plain)
    optimizer = autoshard.offload_optimizer(optim.SGD(plain.parameters(), lr=0.0))
    called: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    backward(plain, 0)
    assert optimizer.step(lambda: torch.is_grad_enabled()) is True  # type: ignore[arg-type]
    assert called == ["before", "after"]


def test_a_scaler_leaves_out_the_fused_step() -> None:
    plain, model = net(), net()
    pairs = [(plain, optim.AdamW(plain.parameters(), fused=True))]
    given = optim.AdamW(model.parameters(), fused=True)
    pairs += [(model, autoshard.offload_optimizer(given))]
    for one, optimizer in pairs:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for factor in (1.0, float("inf"), 2.0):
            loss = sum((factor * p).square().sum() for p in one.parameters())
            scaler.scale(loss).backward()  # type: ignore[arg-type]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == 2.0
    assert same(model, plain)


def test_refusals() -> None:
    def refused(optimizer: optim.Optimizer, match: str) -> None:
        with pytest.raises(AutoshardError, match=match):
            autoshard.offload_optimizer(optimizer)

    model = net()
    refused(optim.LBFGS(model.parameters()), "LBFGS is not known to treat each element")
    refused(optim.Adafactor(model.parameters()), "Adafactor is not known to treat each element")
    refused(optim.AdamW(model.parameters(), differentiable=True), "differentiable=True")
    scheduled = optim.AdamW(model.parameters())
    optim.lr_scheduler.ConstantLR(scheduled)
    refused(scheduled, "has wrapped step")
    twice = autoshard.offload_optimizer(optim.SGD(model.parameters(), lr=0.1))
    refused(twice, "on the host already")

    class Own(optim.SGD):
        pass

    refused(Own(model.parameters()), "elementwise=True")
    autoshard.offload_optimizer(Own(model.parameters()), elementwise=True)
    table = nn.Embedding(4, 2, sparse=True)
    sparse = autoshard.offload_optimizer(optim.SGD(table.parameters(), lr=0.1))
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(AutoshardError, match="is torch.sparse_coo"):
        sparse.step()
