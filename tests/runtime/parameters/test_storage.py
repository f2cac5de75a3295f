"""What moves when a parameter becomes a shard, and where its parts go."""

from __future__ import annotations

import copy
import gc
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autoshard.runtime import compat
from autoshard.runtime.errors import AutoshardError
from autoshard.runtime.mesh import axes_of, init_mesh
from autoshard.runtime.parameters.layout import local_part, stored_states
from autoshard.runtime.parameters.owners import find_owners, related_parameters
from autoshard.runtime.parameters.shard import shard_parameters
from autoshard.runtime.parameters.unsharding import unshard_parameter, unwrap
from gloo_pool import GlooPool
from sharded import (
    Mixed,
    adamw,
    assert_same,
    batch,
    by_dim,
    loss_of,
    stand_in,
    tp,
    whole,
)


def run_initial_weights(broadcast: bool) -> tuple[bool, bool]:
    torch.manual_seed(tp().axis("tp").rank)
    model = Mixed()
    own = model.scale.detach().clone()
    shard_parameters({p: by_dim(p) for p in model.parameters()}, tp(), broadcast=broadcast)
    torch.manual_seed(0)
    first = Mixed().scale.detach()
    mine = slice(4 * tp().axis("tp").rank, None)
    local = model._parameters["scale"].to_local()
    return torch.equal(local, first[mine][:4]), torch.equal(local, own[mine][:4])


def test_initial_weights_come_from_rank_0_unless_trusted(gloo2: GlooPool) -> None:
    assert gloo2(run_initial_weights, True) == [(True, True), (True, False)]
    assert gloo2(run_initial_weights, False) == [(True, True), (False, True)]


def run_what_moves_along() -> None:
    rank = tp().axis("tp").rank
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    weight = model[0].weight
    model[1].bias.requires_grad_(False)
    weight.lr_scale = 0.5
    seen: list[str] = []
    handle = weight.register_hook(lambda grad: seen.append(f"hook {type(grad).__name__}"))
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(f"done {p.lr_scale}"))
    model(torch.ones(1, 4)).sum().backward()
    expected = weight.grad.clone()
    seen.clear()
    kept, by_name = list(model.parameters()), dict(model.named_parameters())
    in_tuple = (weight,)

    shard_parameters({p: by_dim(p) for p in model.parameters()}, tp(), broadcast=True)

    new = model[0]._parameters["weight"]
    assert kept == list(model.parameters()) and kept[0] is by_name["0.weight"] is new
    assert stored_states(new) == {"tp": "S(0)"} and new.lr_scale == 0.5
    assert [p.requires_grad for p in kept] == [True, True, True, False]
    assert torch.equal(new.grad.to_local(), expected[3 * rank : 3 * rank + 3])
    for use in (
        lambda: torch.nn.utils.clip_grad_norm_(in_tuple, 1.0),
        lambda: weight.grad,
        lambda: weight + 1,
    ):
        with pytest.raises(AutoshardError, match=r"Linear\.weight is stored as shards now"):
            use()
    model(torch.ones(1, 4)).sum().backward()
    assert seen == ["hook StoredTensor", "done 0.5"]
    torch.testing.assert_close(new.grad.full_tensor(), 2 * expected)
    handle.remove()
    model(torch.ones(1, 4)).sum().backward()
    assert seen == ["hook StoredTensor", "done 0.5", "done 0.5"]

    assert isinstance(model[0], nn.Linear) and type(model[0]).__name__ == "Linear"
    assert model[0].weight is new and isinstance(new, nn.Parameter) and new.shape == (6, 4)
    if rank == 0:
        repr(model)  # on one rank only: no collective, or the other would wait
        repr(new)
    with torch.no_grad():
        model[0].weight.mul_(2)
    model[0].weight_again = nn.Parameter(torch.ones(1))
    del model[0].bias
    model[0].bias = None
    assert model[0](torch.ones(1, 4)).shape == (1, 6)

    again = shard_parameters({new: {"tp": "S(1)"}, kept[3]: {"tp": "I"}}, tp(), broadcast=False)
    assert list(again) == [new] and stored_states(kept[0]) == {"tp": "S(1)"}
    assert torch.equal(kept[0].full_tensor(), new.full_tensor())


def test_what_moves_along(gloo2: GlooPool) -> None:
    gloo2(run_what_moves_along)


class Factored(torch.optim.Optimizer):
    """Keeps a moment per row and a moment per element."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            row = p.grad.square().mean(-1, keepdim=True)
            state["row"] = state["row"] * 0.9 + row if state else row
            state["mean"] = state["mean"] * 0.5 + p.grad if len(state) > 1 else p.grad.clone()
            state["step"] = state.get("step", torch.tensor(0.0)) + 1
            p.sub_(0.1 * state["mean"] / (state["row"].sqrt() + 0.1))


def run_factored_state() -> None:
    """An optimizer whose state is smaller than its parameter: replicated, as it would be new."""
    torch.manual_seed(0)
    serial = nn.Linear(8, 6)
    model = copy.deepcopy(serial)
    optimizers = [Factored(m.parameters(), {}) for m in (serial, model)]
    for step in range(4):
        if step == 2:
            shard_parameters({p: by_dim(p) for p in model.parameters()}, tp(), broadcast=True)
        for net, optimizer in zip((serial, model), optimizers):
            optimizer.zero_grad()
            net(torch.full((3, 8), step + 1.0)).pow(2).sum().backward()
            optimizer.step()
        for p, q in zip(model.parameters(), serial.parameters(), strict=True):
            torch.testing.assert_close(whole(p), q, rtol=1e-5, atol=1e-6)


def test_factored_optimizer_state(gloo2: GlooPool) -> None:
    gloo2(run_factored_state)


def live_bytes(device: str = "cpu") -> int:
    """Bytes of every distinct storage that some tensor object holds."""
    with_storage = {}
    for item in gc.get_objects():
        if type(item) in (torch.Tensor, nn.Parameter):
            if torch._is_functional_tensor(item):
                continue  # a trace of an earlier test left it: it has no memory of its own
            if item.device.type == device and item.layout is torch.strided:
                storage = torch.Tensor.untyped_storage(item)
                with_storage[storage.data_ptr()] = storage.nbytes()
    return sum(with_storage.values())


def run_peak_memory(device: str) -> tuple[int, int, int, int]:
    """Bytes of the model, of its largest parameter, of a rank's shards, and the highest seen."""
    from autoshard.runtime.parameters import shard as module

    mesh = tp()  # it holds a tensor of its own
    with torch.device(device):
        model = nn.Sequential(nn.Linear(64, 96, bias=False), nn.Linear(96, 64, bias=False))
        model.extend([nn.Linear(64, 64, bias=False) for _ in range(6)])
    sizes = [p.numel() * 4 for p in model.parameters()]
    others = live_bytes() - (sum(sizes) if device == "cpu" else 0)
    seen: list[int] = []
    original = module._store

    def watched(*args: Any) -> Any:
        made = original(*args)
        seen.append(live_bytes() - others)
        return made

    module._store = watched
    try:
        shard_parameters({p: by_dim(p) for p in model.parameters()}, mesh, broadcast=True)
    finally:
        module._store = original
    after = live_bytes() - others
    assert after == sum(sizes) // 2, "nothing whole is left"
    return sum(sizes), max(sizes), after, max(seen)


def test_peak_memory(gloo2: GlooPool) -> None:
    for whole_model, largest, _, peak in gloo2(run_peak_memory, "cpu"):
        assert whole_model < peak <= whole_model + largest
    for _, largest, shards, peak in gloo2(run_peak_memory, "meta"):
        assert peak <= shards + largest


def run_meta() -> None:
    torch.manual_seed(0)
    serial = Mixed().eval()
    with torch.device("meta"):
        model = Mixed().eval()
    optimizer = adamw(model.parameters())
    shard_parameters({p: by_dim(p) for p in model.parameters()}, tp(), broadcast=True)
    assert all(p.to_local().isnan().all() for p in model.parameters())
    assert optimizer.param_groups[0]["params"] == list(model.parameters())
    model.load_state_dict(serial.state_dict())
    log: list[str] = []
    compiled = torch.compile(model, backend=stand_in(log))
    for net in (compiled, serial):
        loss_of(net, batch(1)).backward()
    assert_same(model, serial)
    assert log == [log[0]] and log[0].startswith("run"), log

    with torch.device("meta"):
        planned = nn.Linear(4, 3)
    states = {p: by_dim(p) for p in planned.parameters()}
    shard_parameters(states, tp(), broadcast=True, allocate_meta=False)
    assert planned(torch.ones(2, 4, device="meta")).shape == (2, 3)
    assert all(compat.local_of(p).is_meta for p in planned.parameters())


def test_meta_device(gloo2: GlooPool) -> None:
    gloo2(run_meta)


def run_differing_ranks() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    if tp().axis("tp").rank == 1:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    shard_parameters({p: by_dim(p) for p in model.parameters()}, tp(), broadcast=True)


def test_ranks_with_different_state_are_told(gloo2: GlooPool) -> None:
    with pytest.raises(AutoshardError, match=r"rank 0: Linear\.weight .*gradient False.*rank 1: "):
        gloo2(run_differing_ranks)


def run_unstorable() -> None:
    free = nn.Parameter(torch.ones(2))
    with pytest.raises(AutoshardError, match=r"shape \(2,\) cannot be sharded: no module owns it"):
        shard_parameters({free: {"tp": "I"}}, tp(), broadcast=True)
    odd = nn.Linear(2, 2)
    odd.weight = type("Quantised", (nn.Parameter,), {})(torch.ones(2, 2))
    with pytest.raises(AutoshardError, match=r"Linear\.weight .* it is a Quantised"):
        shard_parameters({odd.weight: {"tp": "I"}}, tp(), broadcast=True)
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())
    with pytest.raises(AutoshardError, match=r"Embedding\.weight .* is trained by SparseAdam"):
        shard_parameters({table.weight: {"tp": "S(0)"}}, tp(), broadcast=True)
    del optimizer
    plain = nn.Linear(2, 2)
    states = {plain.bias: {"tp": "S(0)"}, plain.weight: {"tp": "S(2)"}}
    with pytest.raises(AutoshardError, match=r"2 dims cannot be stored as Shard\(2\)"):
        shard_parameters(states, tp(), broadcast=True)
    assert type(plain.bias) is nn.Parameter  # nothing was begun


def test_what_cannot_be_stored(gloo2: GlooPool) -> None:
    gloo2(run_unstorable)


def run_two_axes(sizes: dict[str, int]) -> None:
    """Stored as FSDP2 over tensor parallelism stores, read back whole, gradients averaged."""
    mesh = init_mesh(sizes, "cpu")
    for rows, dim in itertools.product((16, 18, 37, 6, 3), ("S(0)", "S(1)", "I")):
        full = torch.arange(rows * 8, dtype=torch.float32).view(rows, 8)
        model = nn.Linear(8, rows, bias=False)
        with torch.no_grad():
            model.weight.copy_(full)
        states = {"dp_replicate": "I", "dp_shard": "S(0)", "tp": dim}
        shard_parameters({model.weight: states}, mesh, broadcast=False)
        stored_weight = model._parameters["weight"]
        local = full
        if dim != "I":
            local = local.chunk(2, int(dim[2]))[mesh.axis("tp").rank] if "tp" in sizes else local
        pieces = local.chunk(mesh.axis("dp_shard").size)
        rank = mesh.axis("dp_shard").rank
        local = pieces[rank] if rank < len(pieces) else local[:0]
        assert torch.equal(compat.local_of(stored_weight), local), (rows, dim)
        if rows != 3:  # torch 2.13 itself fails to gather strided shards of which one is empty
            assert torch.equal(stored_weight.full_tensor(), full), (rows, dim)
        assert torch.equal(model.weight, full), (rows, dim)
        scale = 1.0 + mesh.axis("dp_shard").rank + mesh.axis("dp_replicate").rank
        (model.weight * full).sum().mul(scale).backward()
        ranks = [mesh.axis(name).size for name in ("dp_shard", "dp_replicate")]
        mean = 1.0 + sum((n - 1) / 2 for n in ranks)
        expected = local_part(full * mean, states, axes_of(stored_weight.device_mesh))
        assert stored_weight.grad.placements == stored_weight.placements
        torch.testing.assert_close(compat.local_of(stored_weight.grad), expected)


@pytest.mark.parametrize(
    "sizes",
    [
        {"dp_shard": 2, "tp": 2},
        pytest.param({"dp_replicate": 2, "dp_shard": 2}, marks=pytest.mark.slow),
        pytest.param({"dp_shard": 4}, marks=pytest.mark.slow),
    ],
)
def test_two_axes(gloo4: GlooPool, sizes: dict[str, int]) -> None:
    gloo4(run_two_axes, sizes)


def test_a_world_of_one_adds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    model = nn.Linear(4, 4)
    weight = model.weight
    assert (
        shard_parameters({weight: {"tp": "S(0)"}}, init_mesh({"tp": 1}, "cpu"), broadcast=True)
        == {}
    )
    assert model.weight is weight and type(model) is nn.Linear and not dist.is_initialized()
    assert unshard_parameter(weight) is weight and unwrap() == ()


def test_owners() -> None:
    model = Mixed()
    outside = nn.ModuleList([model.norm])
    shared = model.embed.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    other = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
    by_name = {"x": shared}
    owners = find_owners([shared, model.scale])
    assert {(type(m).__name__, n) for m, n in owners.modules[shared]} == {
        ("Embedding", "weight"),
        ("Linear", "weight"),
    }
    assert owners.modules[model.scale] == [(model, "scale")]
    assert optimizer in owners.optimizers and other not in owners.optimizers
    assert any(c is by_name for c in owners.containers)
    assert any(c is optimizer.param_groups[0]["params"] for c in owners.containers)
    gc.freeze()
    try:
        frozen, later = gc.get_freeze_count(), [object()]
        found = find_owners([shared, model.scale])
        assert found.modules[model.scale] == [(model, "scale")]
        assert len(found.modules[shared]) == 2 and found.optimizers == owners.optimizers
        # after other tests the walk finds one list more; why is not known
        held = set(map(id, found.containers))
        assert {id(container) for container in owners.containers} <= held
        assert 0 < gc.get_freeze_count() <= frozen
        assert any(item is later for item in gc.get_objects())  # not frozen since
    finally:
        gc.unfreeze()
    related = related_parameters([model.scale])
    assert related[0] is model.scale
    assert {id(p) for p in related} == {id(p) for p in model.parameters()}
    assert len(outside) == 1


def test_what_python_itself_has_frozen_is_not_climbed_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 starts with 375 frozen objects; the climb to them took six seconds a model."""
    climbed = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 375)
    monkeypatch.setattr(gc, "get_referents", lambda *objects: climbed.append(objects) or [])
    model = nn.Linear(2, 2)
    assert find_owners([model.weight]).modules[model.weight] == [(model, "weight")]
    assert not climbed
