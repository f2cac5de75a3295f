"""`Program.memory()` against the bytes that are alive while a step runs, and liveness by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

import autoshard
from autoshard.memory.inductor_liveness import Fused
from autoshard.memory.liveness import Storage, alias_of, kernels, storages, walk
from autoshard.memory.reused_memory import reused_memory
from autoshard.memory.step import KINDS, OPTIMIZERS
from autoshard.program import Program
from live_storages import LiveStorages, measure_step
from models_hf import llama
from models_plain import MLP

Sizes = dict[str, int]
SHAPE: dict[str, int] = {"hidden_size": 128, "intermediate_size": 512, "vocab_size": 512}


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    config = GPT2Config(vocab_size=512, n_positions=64, n_embd=128, n_layer=2, n_head=4, **dropout)
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # else a warning breaks the graph before the loss
    return model


def measured(
    name: str, sizes: Sizes, inner: str, optimizer: str = "adamw", **options: Any
) -> dict[str, Any]:
    """Bytes of the second step of a model on the mesh, and what its program predicts."""
    torch.manual_seed(0)
    live = LiveStorages()
    model = gpt2() if name == "gpt2" else llama(**SHAPE)()
    ids = torch.randint(3, 512, (4, 64))
    settings = {"mesh": sizes, "inner": inner, "bucket_bytes": 500_000, **options}
    try:
        compiled = torch.compile(model, backend="autoshard", options=settings)
        result: dict[str, Any] = measure_step(
            live,
            model,
            lambda: compiled(input_ids=ids, labels=ids).loss,
            made_by(optimizer, model),
        )
    finally:
        live.restore()
    (program,) = autoshard.programs(model)
    memory = program.memory(optimizer)
    moments = program.memory_timeline(optimizer)
    result["predicted"] = {kind: getattr(memory, kind) for kind in KINDS} | {"peak": memory.peak}
    for phase in ("forward", "backward", "optimizer"):
        result[f"predicted {phase}"] = max(m.bytes for m in moments if m.phase == phase)
    return result


def made_by(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if not kind.startswith("adamw"):
        momentum = 0.9 if kind == "momentum" else 0.0
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    form = {"foreach": kind == "adamw_foreach", "fused": kind == "adamw_fused"}
    return torch.optim.AdamW(model.parameters(), **form)


def check(results: list[dict[str, Any]], tolerance: float) -> None:
    for result in results:
        predicted = result["predicted"]
        for kind in ("parameters", "gradients", "optimizer"):
            assert predicted[kind] == result[kind], (kind, result)
        assert abs(predicted["peak"] / result["peak"] - 1) < tolerance, result
        if tolerance <= 0.05:
            pairs = {"forward": "forward", "backward": "backward", "optimizer": "update"}
            for ours, theirs in pairs.items():
                assert abs(result[f"predicted {ours}"] / result[theirs] - 1) < tolerance, result


CASES: list[tuple[str, Sizes, dict[str, Any]]] = [
    ("llama", {"dp_shard": 2}, {}),
    ("gpt2", {"tp": 2}, {"optimizer": "momentum"}),
]
MORE: list[tuple[str, Sizes, dict[str, Any]]] = [
    ("gpt2", {"dp_shard": 2}, {"zero": 2, "optimizer": "adamw_foreach"}),
    ("gpt2", {"dp_shard": 2}, {"zero": 1}),
    ("llama", {"dp_replicate": 2}, {"optimizer": "adamw_fused"}),
]


@pytest.mark.parametrize(
    ("name", "sizes", "options"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
)
def test_prediction_of_graphs(gloo2: Any, name: str, sizes: Sizes, options: Any) -> None:
    check(gloo2(measured, name, sizes, "aot_eager", **options), 0.02)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"dp_replicate": 2}, {}),
        ({"dp_shard": 2}, {"zero": 1}),
        ({"dp_shard": 2}, {"zero": 3}),
        ({"tp": 2}, {}),
    ],
    ids=["ddp", "zero1", "zero3", "tp"],
)
def test_prediction_for_inductor(gloo2: Any, name: str, sizes: Sizes, options: Any) -> None:
    # zero=2 runs the graphs of zero=1
    check(gloo2(measured, name, sizes, "inductor", **options), 0.05)


@pytest.mark.slow
def test_prediction_for_inductor_on_two_axes(gloo4: Any) -> None:
    check(gloo4(measured, "gpt2", {"dp_shard": 2, "tp": 2}, "inductor", bucket_bytes=500_000), 0.05)


@pytest.mark.slow
def test_prediction_on_two_axes(gloo4: Any) -> None:
    for sizes in ({"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2}):
        check(gloo4(measured, "llama", sizes, "aot_eager"), 0.02)


class Recorded(fx.Interpreter):
    """Runs a graph and remembers the bytes alive at each operator."""

    def __init__(self, gm: fx.GraphModule, live: LiveStorages) -> None:
        super().__init__(gm)
        self.live, self.before, self.bytes = live, live.live, {}

    def run_node(self, n: fx.Node) -> Any:
        self.live.since()
        result = super().run_node(n)
        if n.op == "call_function":
            self.bytes[n.name] = self.live.peak - self.before
        return result


def test_every_operator_of_a_forward_is_exact() -> None:
    torch.compiler.reset()
    model, ids = gpt2(), torch.randint(3, 512, (4, 64))
    batch = {"input_ids": ids, "labels": ids}
    made = autoshard.trace(model, kwargs=batch, mesh={"dp_shard": 1})
    live = LiveStorages()
    live.restore()  # nothing is compiled here
    graph = made.joint.forward
    fakes = [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"]
    inputs = [torch.zeros(fake.shape, dtype=fake.dtype) for fake in fakes]
    for tensor in inputs:
        live.add(tensor)
    recorded = Recorded(graph, live)
    with live:
        recorded.boxed_run(list(inputs))
    moments = made.memory_timeline(inner="aot_eager")
    first = moments[0].bytes
    predicted = {m.node: m.bytes - first for m in moments if m.phase == "forward" and m.node}
    assert predicted == recorded.bytes
    assert len(predicted) > 50


def traced(fn: Any, *args: torch.Tensor) -> fx.Graph:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(fn, tracing_mode="fake")(*args).graph


def alive(graph: fx.Graph) -> list[tuple[str, int]]:
    """(operator, bytes alive while it runs), inputs aside."""
    total, found = 0, []
    for node, _, made, freed in walk(kernels(graph, storages(graph, {}, "x"))):
        total += sum(s.nbytes for s in made)
        found.append((node.name, total))
        total -= sum(s.nbytes for s in freed)
    return found


def test_a_value_is_freed_after_its_last_view() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x * 2  # 64 bytes
        z = y.view(2, 8).t()  # a view: keeps y
        w = x + 1
        return z.sum() + w.sum()

    found = dict(alive(traced(fn, torch.ones(16))))
    assert found["mul"] == 64 and found["view"] == 64
    assert found["add"] == 128
    assert found["sum_1"] == 132  # y is read through z until here
    assert found["sum_2"] == 4 + 64 + 4


def test_tuples_and_lists_of_views() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        values, _ = x.mul(2).sort()
        left, right = values.split(8)
        return left.add_(right)

    graph = traced(fn, torch.ones(16))
    found = dict(alive(graph))
    assert found["sort"] == 64 + 64 + 128
    # the indices die with the tuple, the values live on in their halves and in the result
    assert found["add_"] == 64
    (added,) = [n for n in graph.nodes if n.name == "add_"]
    source = alias_of(added)
    assert source is not None and source.name == "getitem_2"


def test_inputs_that_may_be_freed() -> None:
    graph = traced(lambda x: (x * 2).exp(), torch.ones(16))
    (x,) = [n for n in graph.nodes if n.op == "placeholder"]
    held = storages(graph, {x: (Storage(64, "x"),)}, "y")
    steps = {change.node.name: change.freed for change in walk(kernels(graph, held), held[x])}
    assert [s.kind for s in steps["mul"]] == ["x"]
    assert [s.kind for s in steps["exp"]] == ["y"]


def fused(fn: Any) -> tuple[Fused, dict[str, str]]:
    """What Inductor would run, and which kernel's result is in the memory of which other's."""
    made = Fused(traced(fn, torch.ones(16, 16)), {}, "x")
    names = {s: kernel.node.name for kernel in made.kernels for s in kernel.writes}
    reused = reused_memory(made.kernels)
    return made, {names[new]: names[old] for new, old in reused.items()}


def test_a_loop_stores_what_others_need() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = (x * 2 + 1).relu()  # one loop, stored for the product
        return (y @ y).exp().sum()  # one loop, of which only the sum is stored

    made, reused = fused(fn)
    run = [(k.node.name, [s.nbytes for s in k.writes]) for k in made.kernels[:-1]]
    assert run == [("relu", [1024]), ("mm", [1024]), ("sum_1", [4])]
    assert reused == {}


def test_what_is_dear_is_computed_once() -> None:
    def stored(fn: Any, name: str) -> bool:
        made, _ = fused(fn)
        (storages,) = [held for node, held in made.held.items() if node.name == name]
        return any(s in k.writes for k in made.kernels for s in storages)

    # cheap enough for each reader; a part of the one loop that its readers are; read by a product
    assert not stored(lambda x: ((x + 1) * 2 @ x, (x + 1).sum(1)), "add")
    assert not stored(lambda x: (lambda y: (y * 2) @ ((y + 3) @ x))(x.tanh()), "tanh")
    assert stored(lambda x: (lambda y: (y * 2) @ ((y @ x) + 3))(x.tanh()), "tanh")


def test_memory_of_the_dead_is_used_again() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        one = x @ x
        two = one.tanh()  # in place
        three = two @ x
        return three @ x  # where two was

    _, reused = fused(fn)
    assert reused == {"tanh": "mm", "mm_2": "tanh"}


def test_memory_is_not_kept_where_the_peak_would_rise() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        one = x @ x
        two = one @ x  # one is dead after it
        wide = torch.cat([two] * 8)  # what is alive here is the most there is
        return (wide.sum() + two) @ x

    _, reused = fused(fn)
    assert "mm_2" not in reused


def test_pieces_are_computed_into_their_concatenation() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x / 2, (x @ x) / 3]) @ x

    made, _ = fused(fn)
    whole = {s for k in made.kernels if k.node.name.startswith("div") for s in k.writes}
    assert [s.nbytes for s in whole] == [2048]


def program(zero: int = 3, **options: Any) -> Program:
    torch.compiler.reset()
    model = llama(num_hidden_layers=4, **SHAPE)()
    ids = torch.zeros(4, 64, dtype=torch.long)
    if options.pop("recompute", False):
        model.train().activation_checkpointing_enable()
    batch = {"input_ids": ids, "labels": ids}
    mesh = options.pop("mesh", {"dp_shard": 8})
    return autoshard.trace(model, kwargs=batch, mesh=mesh, zero=zero, **options)


def test_recomputation_keeps_less_and_peaks_lower() -> None:
    without, recomputed = program().memory(), program(recompute=True).memory()
    assert recomputed.activations < 0.4 * without.activations
    assert recomputed.peak < 0.85 * without.peak
    assert recomputed.parameters == without.parameters


@pytest.mark.slow
def test_stages_of_zero() -> None:
    """Kept weights count as gathered, not as activations; a bucket at a time is less."""
    three, two = program(3).memory(), program(2).memory()
    assert three.activations == two.activations and three.peak < two.peak
    small = program(3, bucket_bytes=200_000).memory()
    assert small.gathered < 0.6 * three.gathered and small.peak < three.peak
    whole = program(mesh={"dp_replicate": 8}).memory()
    assert whole.parameters == 8 * three.parameters and whole.optimizer > 7 * three.optimizer


def test_timeline_covers_every_operator_and_ends_as_it_began() -> None:
    made = program()
    moments = made.memory_timeline("sgd", "aot_eager")
    graphs = {"forward": made.running.forward, "backward": made.running.backward}
    for phase, gm in graphs.items():
        assert gm is not None
        names = [n.name for n in gm.graph.nodes if n.op == "call_function"]
        assert [m.node for m in moments if m.phase == phase and m.node in names] == names
    memory = made.memory("sgd", "aot_eager")
    assert memory.peak == max(m.bytes for m in moments) == memory.peak_at.bytes
    assert memory.optimizer == 0
    last = moments[-1]
    assert last.phase == "optimizer"
    # every gradient exists when backward ends, as a part of its bucket, which has some padding
    held = last.held["gradients"]
    assert memory.gradients <= held <= 1.01 * memory.gradients
    assert last.bytes == memory.parameters + held + memory.buffers
    assert all(min(m.held.values()) >= 0 for m in moments)
    assert moments[-2].held["gradients"] == held


def test_optimizers_differ_in_state_and_scratch() -> None:
    made = program()
    found = {name: made.memory(name) for name in OPTIMIZERS}
    trained = found["sgd"].gradients
    count = len(made.parameters)
    assert found["adamw"].optimizer == 2 * trained + 4 * count
    assert found["momentum"].optimizer == trained
    with pytest.raises(ValueError, match="'lion' is none of adamw"):
        made.memory("lion")


def test_a_program_without_backward() -> None:
    torch.compiler.reset()
    model = MLP().requires_grad_(False)
    made = autoshard.trace(model, (torch.ones(8, 64),), mesh={"tp": 2})
    memory = made.memory(inner="aot_eager")
    assert memory.activations == memory.gradients == memory.optimizer == 0
    assert memory.peak == memory.parameters + 4 * 8 * (128 + 128)
    # Inductor applies the activation where the product is; the row bias, divided by the ranks
    assert made.memory().peak == memory.parameters + 4 * (8 * 128 + 64 + 8 * 64)
