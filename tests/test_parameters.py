"""Sharded storage against the serial model, in two processes, through a backend of ten lines."""

from __future__ import annotations

import copy
import functools
import gc
import io
import itertools
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import fx, nn
from torch.distributed.tensor import DTensor

from autoshard.runtime import compat
from autoshard.runtime.errors import AutoshardError
from autoshard.runtime.materialize import materialize, unwrap
from autoshard.runtime.mesh import Mesh, axes_of, init_mesh
from autoshard.runtime.parameters import (
    find_owners,
    related_parameters,
    shard_parameters,
    stored,
    stored_states,
)
from autoshard.runtime.storage import local_part
from gloo_pool import GlooPool

State = dict[str, str]


def tp(size: int = 2) -> Mesh:
    return init_mesh({"tp": size}, "cpu")


def by_dim(parameter: nn.Parameter) -> State:
    """Rows where there are two dims, replicated biases, columns of anything else."""
    return {"tp": {1: "R", 2: "S(0)"}.get(parameter.dim(), "S(1)")}


def sharding_backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, log: list[str]
) -> Callable[..., Any]:
    """Store the parameters, ask for another trace, and run that as it is: materialize is exact."""
    inputs = compat.graph_inputs(gm)
    parameters = [i.real for i in inputs if isinstance(i.real, nn.Parameter)]
    whole = [p for p in related_parameters(parameters) if not isinstance(p, DTensor)]
    if whole:
        log.append("shard")
        moved = shard_parameters({p: by_dim(p) for p in whole}, tp(), broadcast=True)
        raise compat.RestartTrace(keep=moved)
    for item in inputs:
        assert (item.real is None) == item.source.isidentifier() or item.source.startswith("L[")
    calls = [n for n in gm.graph.nodes if n.op == "call_function" and n.target is materialize]
    log.append(f"run {len({n.args[0] for n in calls})} of {len(parameters)}")
    return gm.forward


def compiled_pair(make: Callable[[], nn.Module], rank: int) -> tuple[Any, ...]:
    """A serial model, its equal to be sharded, and the compiled one. Ranks start apart: rank 0's
    weights must reach rank 1."""
    torch.manual_seed(3)
    serial = make()
    torch.manual_seed(3 + rank)
    model = make()
    log: list[str] = []
    compiled = torch.compile(model, backend=functools.partial(sharding_backend, log=log))
    return serial, model, compiled, log


def whole(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same(model: nn.Module, serial: nn.Module, tolerance: float = 1e-6) -> None:
    """Values and gradients of every parameter, by name."""
    expected = dict(serial.named_parameters())
    assert [n for n, _ in model.named_parameters()] == list(expected)
    for name, p in model.named_parameters():
        torch.testing.assert_close(whole(p), expected[name], rtol=tolerance, atol=tolerance)
        if expected[name].grad is None:
            assert p.grad is None, name
        else:
            assert isinstance(p.grad, DTensor) == isinstance(p, DTensor), name
            torch.testing.assert_close(
                whole(p.grad), expected[name].grad, rtol=tolerance, atol=tolerance, msg=name
            )


def local_fraction(model: nn.Module) -> float:
    parameters = list(model.parameters())
    local = sum(compat.local_of(p).numel() for p in parameters if isinstance(p, DTensor))
    return local / sum(p.numel() for p in parameters)


class Mixed(nn.Module):
    """Tied, frozen, unused, listed and root parameters, an uneven dim, and a graph break."""

    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.broken = broken
        self.embed = nn.Embedding(11, 8)
        self.scale = nn.Parameter(torch.randn(8, 8))
        self.listed = nn.ParameterList([nn.Parameter(torch.randn(8, 8)) for _ in range(2)])
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.randn(8))})
        self.norm = nn.LayerNorm(8)
        self.frozen = nn.Linear(8, 7)
        self.back = nn.Linear(7, 8)
        self.unused = nn.Linear(3, 4)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) @ self.scale
        for weight in self.listed:
            x = x + torch.tanh(x @ weight)
        x = self.norm(x + self.named["shift"])
        if self.broken:
            torch._dynamo.graph_break()
        if not self.training:
            x = x * 2
        return self.head(x + self.back(torch.relu(self.frozen(x))))


def loss_of(model: Callable[..., torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    out = model(ids)
    return F.cross_entropy(out.flatten(0, 1), ids.flatten())


def batch(step: int, rows: int = 4) -> torch.Tensor:
    return torch.randint(11, (rows, 5), generator=torch.Generator().manual_seed(step))


def train(
    model: Callable[..., torch.Tensor], parameters: Any, optimizer: Any, step: int, rows: int = 4
) -> tuple[float, float]:
    optimizer.zero_grad()
    loss = loss_of(model, batch(step, rows))
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    optimizer.step()
    return loss.item(), float(whole(norm))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    # a large eps: with the default, gradients near 0 turn rounding into whole steps
    return torch.optim.AdamW(parameters, lr=0.05, eps=1e-3, foreach=True)


def run_training(broken: bool) -> tuple[list[str], float]:
    """Two unsharded steps, then sharded ones, with one optimizer that was there before."""
    rank = tp().axis("tp").rank
    serial, model, compiled, log = compiled_pair(lambda: Mixed(broken), 0 * rank)
    parameters = [p for p in model.parameters() if p.requires_grad]
    mine, reference = adamw(parameters), adamw(p for p in serial.parameters() if p.requires_grad)
    scheduler = torch.optim.lr_scheduler.StepLR(mine, 4, 0.5)
    scheduler_reference = torch.optim.lr_scheduler.StepLR(reference, 4, 0.5)
    for step in range(8):
        rows = 6 if step >= 6 else 4
        got = train(model if step < 2 else compiled, parameters, mine, step, rows)
        expected = train(serial, list(serial.parameters()), reference, step, rows)
        assert got == pytest.approx(expected, rel=1e-6), step
        assert_same(model, serial)
        scheduler.step()
        scheduler_reference.step()
        if step == 4:
            model.eval(), serial.eval()
            with torch.no_grad():
                torch.testing.assert_close(compiled(batch(99)), serial(batch(99)))
            model.train(), serial.train()
    scale = model._parameters["scale"]
    held = mine.state[scale]["exp_avg"]
    assert isinstance(held, DTensor) and held.placements == scale.placements
    assert not isinstance(mine.state[scale]["step"], DTensor)
    assert model.head.weight.shape == (11, 8)
    assert model.head._parameters["weight"] is model.embed._parameters["weight"]
    torch.testing.assert_close(model(batch(7)), serial(batch(7)))  # not compiled
    return log, local_fraction(model)


@pytest.mark.parametrize("broken", [False, True])
def test_training_from_an_optimizer_with_state(gloo2: GlooPool, broken: bool) -> None:
    for log, fraction in gloo2(run_training, broken):
        assert log[0] == "shard" and log.count("shard") == 1, log
        runs = [line.split() for line in log[1:]]
        assert runs and all(run[1] == run[3] for run in runs), log  # no parameter without node
        # train, eval without gradients, another batch size; two graphs each after a break
        assert len(runs) == (6 if broken else 3), log
        assert 0.5 < fraction < 0.7


class Attention(nn.Module):
    """The modules that read their parameters in their own ways, and an uneven LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(8, 2, 6, dropout=0.0, batch_first=True)
        self.rnn = nn.LSTM(8, 5, num_layers=2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(10, 3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.attention(x, x, x, need_weights=False)[0])
        return self.gru(self.rnn(x)[0])[0]


def run_eager_modules() -> tuple[float, int]:
    """A model stored as shards that nothing compiled: slow, and exact."""
    torch.manual_seed(0)
    serial = Attention()
    model = copy.deepcopy(serial)
    shard_parameters({p: by_dim(p) for p in model.parameters()}, tp(), broadcast=True)
    for training in (True, False):
        serial.train(training), model.train(training)
        for net in (serial, model):
            net.zero_grad()
        x = torch.randn(3, 4, 8)
        expected, got = serial(x), model(x)
        torch.testing.assert_close(got, expected)
        expected.pow(2).sum().backward()
        got.pow(2).sum().backward()
        assert_same(model, serial, 1e-5)
        with torch.no_grad():  # the fast path of attention
            torch.testing.assert_close(model(x), serial(x))
    first = model.rnn._parameters["weight_ih_l0"]
    model.rnn.weight_ih_l0 = nn.Parameter(torch.zeros(20, 8))
    assert (
        not model.rnn._flat_weights[0].any() and model.rnn._parameters["weight_ih_l0"] is not first
    )
    return local_fraction(model), len(repr(model))


def test_modules_with_their_own_ways_of_reading(gloo2: GlooPool) -> None:
    for fraction, _ in gloo2(run_eager_modules):
        assert 0.4 < fraction < 0.7


def run_first_call_without_gradients(context: str) -> None:
    serial, model, compiled, log = compiled_pair(Mixed, 0)
    serial.eval(), model.eval()
    with getattr(torch, context)():
        torch.testing.assert_close(compiled(batch(0)), serial(batch(0)))
    for net in (compiled, serial):
        loss_of(net, batch(1)).backward()
    assert_same(model, serial)
    adamw(model.parameters()).step()  # an inference tensor could not be updated


@pytest.mark.parametrize("context", ["no_grad", "inference_mode"])
def test_the_first_call_may_be_inference(gloo2: GlooPool, context: str) -> None:
    gloo2(run_first_call_without_gradients, context)


def sharded_mixed(seed: int = 0) -> Mixed:
    torch.manual_seed(seed)
    model = Mixed().eval()
    shard_parameters({p: by_dim(p) for p in model.parameters()}, tp(), broadcast=True)
    return model


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


def trained_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    loss_of(model, batch(0)).backward()
    optimizer = adamw(p for p in model.parameters() if p.grad is not None)
    optimizer.step()
    return optimizer


def run_checkpoints(folder: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    serial = Mixed().eval()
    keys = list(serial.state_dict())
    model = sharded_mixed(1)
    assert list(model.state_dict()) == keys
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())
    whole_state = {name: value.full_tensor() for name, value in model.state_dict().items()}

    optimizer = trained_optimizer(model)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)

    other = sharded_mixed(2)
    other_optimizer = trained_optimizer(other)
    weights, moments = get_state_dict(other, other_optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(other, other_optimizer, model_state_dict=weights, optim_state_dict=moments)
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p.to_local(), q.to_local()), name
        if p.grad is not None:
            mine, theirs = optimizer.state[p]["exp_avg"], other_optimizer.state[q]["exp_avg"]
            assert torch.equal(mine.to_local(), theirs.to_local()), name

    other.load_state_dict(whole_state)  # whole tensors
    model.load_state_dict(other.state_dict())  # DTensors
    serial.load_state_dict(whole_state)
    torch.testing.assert_close(model(batch(0)), serial(batch(0)))
    other.load_state_dict(model.state_dict(), assign=True)
    torch.testing.assert_close(other(batch(0)), serial(batch(0)))
    with pytest.raises(RuntimeError, match="size mismatch for scale"):
        model.load_state_dict({**whole_state, "scale": torch.zeros(4, 8)})

    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for copied in (torch.load(buffer, weights_only=False), copy.deepcopy(model)):
        assert isinstance(copied.head, nn.Linear) and type(copied.head) is type(model.head)
        assert copied.head._parameters["weight"] is copied.embed._parameters["weight"]
        torch.testing.assert_close(copied(batch(0)), serial(batch(0)))
    rnn = copy.deepcopy(nn.LSTM(4, 4))
    shard_parameters({p: by_dim(p) for p in rnn.parameters()}, tp(), broadcast=True)
    x = torch.randn(2, 4)
    torch.testing.assert_close(copy.deepcopy(rnn)(x)[0], rnn(x)[0])


def test_checkpoints_and_copies(gloo2: GlooPool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        gloo2(run_checkpoints, folder)


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
    assert seen == ["hook DTensor", "done 0.5"]
    torch.testing.assert_close(new.grad.full_tensor(), 2 * expected)
    handle.remove()
    model(torch.ones(1, 4)).sum().backward()
    assert seen == ["hook DTensor", "done 0.5", "done 0.5"]

    assert isinstance(model[0], nn.Linear) and type(model[0]).__name__ == "Linear"
    assert not isinstance(model[0].weight, DTensor) and model[0].weight.shape == (6, 4)
    if rank == 0:
        repr(model)  # on one rank only: no collective, or the other would wait
    with stored(), torch.no_grad():
        model[0].weight.mul_(2)
    model[0].weight_again = nn.Parameter(torch.ones(1))
    del model[0].bias
    model[0].bias = None
    assert model[0](torch.ones(1, 4)).shape == (1, 6)

    again = shard_parameters({new: {"tp": "S(1)"}, kept[3]: {"tp": "R"}}, tp(), broadcast=False)
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
            if item.device.type == device and item.layout is torch.strided:
                storage = torch.Tensor.untyped_storage(item)
                with_storage[storage.data_ptr()] = storage.nbytes()
    return sum(with_storage.values())


def run_peak_memory(device: str) -> tuple[int, int, int, int]:
    """Bytes of the model, of its largest parameter, of a rank's shards, and the highest seen."""
    from autoshard.runtime import parameters as module

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
        shard_parameters({p: by_dim(p) for p in model.parameters()}, tp(), broadcast=True)
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
    compiled = torch.compile(model, backend=functools.partial(sharding_backend, log=log))
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
        shard_parameters({free: {"tp": "R"}}, tp(), broadcast=True)
    odd = nn.Linear(2, 2)
    odd.weight = type("Quantised", (nn.Parameter,), {})(torch.ones(2, 2))
    with pytest.raises(AutoshardError, match=r"Linear\.weight .* it is a Quantised"):
        shard_parameters({odd.weight: {"tp": "R"}}, tp(), broadcast=True)
    plain = nn.Linear(2, 2)
    states = {plain.bias: {"tp": "S(0)"}, plain.weight: {"tp": "S(2)"}}
    with pytest.raises(AutoshardError, match=r"2 dims cannot be stored in state S\(2\)"):
        shard_parameters(states, tp(), broadcast=True)
    assert type(plain.bias) is nn.Parameter  # nothing was begun


def test_what_cannot_be_stored(gloo2: GlooPool) -> None:
    gloo2(run_unstorable)


def run_two_axes(sizes: dict[str, int]) -> None:
    """Stored as FSDP2 over tensor parallelism stores, read back whole, gradients averaged."""
    mesh = init_mesh(sizes, "cpu")
    for rows, dim in itertools.product((16, 18, 37, 6, 3), ("S(0)", "S(1)", "R")):
        full = torch.arange(rows * 8, dtype=torch.float32).view(rows, 8)
        model = nn.Linear(8, rows, bias=False)
        with torch.no_grad():
            model.weight.copy_(full)
        states = {"dp_replicate": "R", "dp_shard": "S(0)", "tp": dim}
        shard_parameters({model.weight: states}, mesh, broadcast=False)
        stored_weight = model._parameters["weight"]
        local = full
        if dim != "R":
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
    "sizes", [{"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 4}]
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
    assert materialize(weight) is weight and unwrap() == ()


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
        assert find_owners([model.scale]).modules[model.scale] == [(model, "scale")]
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()
    related = related_parameters([model.scale])
    assert related[0] is model.scale
    assert {id(p) for p in related} == {id(p) for p in model.parameters()}
    assert len(outside) == 1


def test_the_probe_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    compat.probe()
    monkeypatch.setattr(torch, "__version__", "2.4.1+cpu")
    with pytest.raises(AutoshardError, match=r"torch 2\.4\.1\+cpu is too old.*2\.11"):
        compat.probe()
    monkeypatch.undo()
    monkeypatch.delattr(torch._guards, "TracingContext")
    with pytest.raises(AutoshardError, match=r"has no torch\._guards\.TracingContext"):
        compat.probe()
