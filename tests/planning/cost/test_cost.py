"""The cost model against the tables of the algebra, the reference ledger, and torch's counter."""

from __future__ import annotations

import itertools
import json
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from autoshard.planning.cost.clusters import HARDWARE, cluster, cluster_of
from autoshard.planning.cost.machines import Efficiency, Link, RowExchange, dtype_class
from autoshard.planning.cost.model import (
    CHANGE_SECONDS,
    OperatorWork,
    change_collectives,
    change_seconds,
    collective_seconds,
    hint,
    node_bytes,
    node_flops,
    ring_bytes,
)
from autoshard.runtime.collectives import Axis, step
from autoshard.runtime.operators import attend_by_heads, attend_to_both_ends, attend_to_prefix

# Typed from the design's table of transitions, not derived: "-" is no collective.
TRANSITIONS = """
    I    R    -              all_reduce
    P    I    all_reduce     -
    P    S(0) reduce_scatter all_gather
    S(0) R    all_gather     reduce_scatter
    S(0) I    all_gather     -
    I    S(0) -              all_gather
    R    S(0) -              -
    S(0) S(1) all_to_all     all_to_all
    S(1) S(0) all_to_all     all_to_all
    R    I    -              -
    I    P    -              -
    S(0) P    -              -
    P    R    all_reduce     all_reduce
    R    P    -              -
    P    S(1) reduce_scatter all_gather
    S(1) R    all_gather     reduce_scatter
    S(1) I    all_gather     -
    I    S(1) -              all_gather
    R    S(1) -              -
    S(1) P    -              -
"""
STATES = ("I", "R", "P", "S(0)", "S(1)")
SLOW = Link(latency=1.0, bandwidth=1.0, copy_bandwidth=float("inf"))
FREE = Link(latency=0.0, bandwidth=float("inf"), copy_bandwidth=float("inf"))


def transitions() -> list[tuple[str, str, tuple[str, ...], tuple[str, ...]]]:
    rows = [line.split() for line in TRANSITIONS.split("\n") if line.strip()]
    ops = {"-": ()}
    return [(a, b, ops.get(f, (f,)), ops.get(g, (g,))) for a, b, f, g in rows]


def test_the_table_lists_every_change() -> None:
    pairs = {(src, dst) for src, dst, _, _ in transitions()}
    assert pairs == set(itertools.permutations(STATES, 2))


@pytest.mark.parametrize(("src", "dst", "forward", "backward"), transitions())
def test_change(src: str, dst: str, forward: tuple[str, ...], backward: tuple[str, ...]) -> None:
    assert change_collectives(src, dst) == (forward, backward)
    # Logical bytes of a collective on a tensor of 64 bytes over 4 ranks; all-to-all is local.
    size = {"all_to_all": 16}
    seconds = [
        sum(collective_seconds(op, size.get(op, 64), 4, SLOW) for op in ops)
        for ops in (forward, backward)
    ]
    trained = change_seconds(src, dst, 64, 4, SLOW, differentiable=True)
    served = change_seconds(src, dst, 64, 4, SLOW, differentiable=False)
    assert trained == pytest.approx(CHANGE_SECONDS + sum(seconds), rel=1e-12)
    assert served == pytest.approx(CHANGE_SECONDS + seconds[0], rel=1e-12)
    assert change_seconds(src, dst, 64, 4, FREE, differentiable=True) == CHANGE_SECONDS


@pytest.mark.parametrize("state", STATES)
def test_staying_is_free(state: str) -> None:
    assert change_collectives(state, state) == ((), ())
    assert change_seconds(state, state, 64, 4, SLOW, differentiable=True) == 0.0


@pytest.mark.parametrize(
    ("src", "dst", "nbytes"),
    [
        ("I", "P", 128),  # scale: 64 read, 64 written
        ("I", "S(1)", 32),  # slice: a quarter read, a quarter written
        ("S(1)", "P", 80),  # pad: a quarter read, all written
        ("S(0)", "I", 0),
        ("S(1)", "I", 128),
        ("P", "S(0)", 0),
        ("P", "S(2)", 128),
        ("S(0)", "S(1)", 32),
        ("S(1)", "S(2)", 64),
        ("P", "I", 0),
    ],
)
def test_local_copies(src: str, dst: str, nbytes: int) -> None:
    link = Link(latency=0.0, bandwidth=float("inf"), copy_bandwidth=1.0)
    seconds = change_seconds(src, dst, 64, 4, link, differentiable=False)
    assert seconds - CHANGE_SECONDS == pytest.approx(nbytes)


def test_local_steps_have_names() -> None:
    steps = {step(*pair) for pair in itertools.permutations(("I", "P", "S(0)"), 2)}
    assert steps == {"scale", "slice", "pad", "all_reduce", "reduce_scatter", "all_gather"}


def layer_bytes(changes: list[tuple[str, str]], n: int, nbytes: int) -> tuple[list[str], float]:
    ops = [op for pair in changes for phase in change_collectives(*pair) for op in phase]
    return sorted(ops), sum(ring_bytes(op, nbytes, n) for op in ops)


@pytest.mark.parametrize("t", [2, 4, 8])
def test_the_ledger_of_a_transformer_layer(t: int) -> None:
    nbytes = 2 * 4096 * 4096
    # Attention and MLP each: into the column-parallel products, out of the row-parallel one.
    tensor = [("I", "R"), ("P", "I")] * 2
    sequence = [("S(1)", "R"), ("P", "S(1)")] * 2
    assert layer_bytes(tensor, t, nbytes) == (["all_reduce"] * 4, 8 * (t - 1) / t * nbytes)
    assert layer_bytes(sequence, t, nbytes) == (
        ["all_gather"] * 4 + ["reduce_scatter"] * 4,
        8 * (t - 1) / t * nbytes,
    )


def test_latency_counts_the_steps_of_the_ring() -> None:
    link = Link(latency=1.0, bandwidth=float("inf"), copy_bandwidth=1.0)
    steps = {op: collective_seconds(op, 64, 8, link) for op in ("all_reduce", "all_gather")}
    assert steps == {"all_reduce": 14.0, "all_gather": 7.0}
    assert collective_seconds("all_reduce", 64, 1, SLOW) == 0.0


def test_unknown_collective() -> None:
    with pytest.raises(ValueError, match="unknown collective 'broadcast'; known: all_reduce"):
        ring_bytes("broadcast", 1, 2)


def test_roofline() -> None:
    h100 = cluster("h100").sheet
    assert h100.seconds(OperatorWork(989e12, 0, torch.bfloat16)) == 1.0
    assert h100.seconds(OperatorWork(989e12, 2 * 3350e9, torch.bfloat16)) == 2.0
    assert h100.seconds(OperatorWork(67e12, 0, torch.float32)) == 1.0


def test_an_all_to_all_leaves_the_node_over_the_link_of_a_rank() -> None:
    """Of 16 ranks on two nodes half of the rows leave, at 50 GB/s; a ring of eight has eight such
    links. A token with 8 experts goes once to the node of 255 of 256, in place of 4 times."""
    h100, nbytes = cluster("h100"), 50e9
    for rows, part in ((RowExchange(), 0.5), (RowExchange(deduplicated=True), 255 / 256 / 8)):
        link = replace(replace(h100, rows=rows).link(16, 1), latency=0.0)
        assert collective_seconds("all_to_all", nbytes, 16, link, copies=8) == pytest.approx(part)
        assert collective_seconds("all_to_all", nbytes, 16, link) == pytest.approx(0.5)
        ring = collective_seconds("all_gather", nbytes, 16, link)
        assert ring == pytest.approx(15 / 16 * 50 / 400)
    near = replace(h100.link(8, 1), latency=0.0)
    assert collective_seconds("all_to_all", nbytes, 8, near, copies=8) == nbytes * 7 / 8 / 450e9
    sheet = h100.link(16, 1)
    real = replace(h100, efficiency=Efficiency(links=0.5, memory=0.25)).real(sheet)
    assert real.across is not None and sheet.across is not None
    got, given = ((x.bandwidth, x.across.way, x.copy_bandwidth) for x in (real, sheet))
    assert got == (given[0] / 2, given[1] / 2, given[2] / 4)


@pytest.mark.parametrize(
    "name, half, memory, like",
    [("nvl", 835, 3900, "h100"), ("mi300x", 1307, 5300, "h200"), ("gb300", 2500, 8000, "b200")],
)
def test_a_data_sheet_alone_has_the_efficiencies_of_the_nearest(
    tmp_path: Path, name: str, half: float, memory: float, like: str
) -> None:
    rates = {"float8": 2 * half, "half": half, "float32": 67, "float64": 67}
    link = {"microseconds": 1, "gigabytes_per_second": 450}
    body = {
        "name": name,
        "devices_per_node": 8,
        "memory": {"gigabytes": 80, "gigabytes_per_second": memory},
        **{"tera_flops": rates, "inside": link, "between": link},
    }
    (tmp_path / "sheet.json").write_text(json.dumps(body))
    (tmp_path / "told.json").write_text(json.dumps({**body, "efficiency": {"links": 0.5}}))
    read, told = (cluster(str(tmp_path / file)) for file in ("sheet.json", "told.json"))
    assert read.assumed == told.assumed == like and not cluster(like).assumed
    assert read.efficiency == cluster(like).efficiency
    assert told.efficiency == replace(read.efficiency, links=0.5)


def test_programs_get_parts_of_the_data_sheet() -> None:
    share = Efficiency(0.5, 0.25, attention=0.1, float8=0.2, narrow=100.0)
    machine = replace(cluster("h100"), efficiency=share)
    assert machine.seconds(OperatorWork(989e12, 0, torch.bfloat16)) == 2.0
    assert machine.seconds(OperatorWork(989e12, 3350e9, torch.bfloat16)) == 4.0
    assert machine.seconds(OperatorWork(989e12, 0, torch.bfloat16, narrowest=100.0)) == 4.0
    assert machine.seconds(OperatorWork(989e12, 0, torch.bfloat16, attention=True)) == 20.0
    assert machine.seconds(OperatorWork(1979e12, 0, torch.float8_e4m3fn)) == 10.0


def traced(fn: Callable[..., object], *inputs: tuple[int, ...] | torch.Tensor) -> fx.Node:
    """The one operator of `fn` in a graph captured as the planner sees it."""
    inputs = tuple(torch.empty(i) if isinstance(i, tuple) else i for i in inputs)
    graph = make_fx(fn, tracing_mode="fake", pre_dispatch=True)(*inputs).graph
    found: list[fx.Node] = [
        n
        for n in graph.nodes
        if n.op == "call_function" and isinstance(n.target, torch._ops.OpOverload)
    ]
    (node,) = found
    return node


OPERATORS: dict[str, tuple[Callable[..., object], list[tuple[int, ...]]]] = {
    "linear": (F.linear, [(2, 3, 8), (5, 8), (5,)]),
    "mm": (torch.mm, [(3, 4), (4, 5)]),
    "matmul": (torch.matmul, [(2, 3, 4, 5), (5, 6)]),
    "bmm": (torch.bmm, [(2, 3, 4), (2, 4, 5)]),
    "addmm": (torch.addmm, [(7,), (3, 4), (4, 7)]),
    "baddbmm": (torch.baddbmm, [(2, 3, 5), (2, 3, 4), (2, 4, 5)]),
    "conv1d": (F.conv1d, [(2, 4, 16), (6, 4, 3)]),
    "conv2d strided, grouped": (
        lambda x, w: F.conv2d(x, w, stride=2, groups=2),
        [(2, 4, 9, 9), (6, 2, 3, 3)],
    ),
    "conv_transpose2d": (F.conv_transpose2d, [(2, 4, 5, 5), (4, 6, 3, 3)]),
    "einsum": (lambda a, b: torch.einsum("bqhd,bkhd->bhqk", a, b), [(2, 3, 4, 5), (2, 6, 4, 5)]),
    "einsum, ellipsis": (lambda a, b: torch.einsum("...ij,jk", a, b), [(2, 7, 3, 4), (4, 5)]),
    "attention": (
        F.scaled_dot_product_attention,
        [(2, 3, 8, 16), (2, 3, 12, 16), (2, 3, 12, 16)],
    ),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_flops_agree_with_torch(name: str) -> None:
    fn, shapes = OPERATORS[name]
    inputs = [torch.zeros(shape) for shape in shapes]
    with FlopCounterMode(display=False) as counter:
        if name == "attention":  # spelt out: the counter does not know the kernel of the CPU
            query, key, value = inputs
            torch.softmax(query @ key.mT, -1) @ value
        else:
            fn(*inputs)
    assert node_flops(traced(fn, *shapes)) == counter.get_total_flops() > 0


@pytest.mark.parametrize("rows,columns", [(8, 8), (3, 8), (8, 3), (1, 1)])
def test_causal_attention_counts_the_scores_it_computes(rows: int, columns: int) -> None:
    query, key = torch.zeros(2, 4, rows, 8), torch.zeros(2, 4, columns, 8)

    def flops(causal: bool) -> int:
        gm = make_fx(
            lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=causal),
            tracing_mode="fake",
            pre_dispatch=True,
        )(query, key)
        return sum(map(node_flops, gm.graph.nodes))

    seen = int(torch.ones(rows, columns).tril().sum())
    assert flops(False) == 2 * 2 * 4 * rows * columns * (8 + 8)
    assert flops(True) == pytest.approx(flops(False) * seen / (rows * columns), abs=1)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_a_rank_of_cp_counts_its_share_of_the_scores(n: int, causal: bool) -> None:
    """Of 16 rows and heads of 8: its part of all heads, two chunks of rows, or the last rows."""
    whole = 2 * 2 * 4 * 16 * 16 * (8 + 8) // (2 if causal else 1)

    def flops(target: Callable[..., object], keys: int, **kwargs: object) -> int:
        graph = fx.Graph()
        args = []
        for rows in (16 // n, keys, keys):
            args.append(graph.placeholder(f"x{len(args)}"))
            args[-1].meta["val"] = torch.empty(2, 4, rows, 8, device="meta")
        node = graph.call_function(
            target, tuple(args), {"axis": Axis("cp", n, 0, "lockstep"), **kwargs}
        )
        node.meta["val"] = args[0].meta["val"]
        return node_flops(node)

    attention = F.scaled_dot_product_attention
    assert flops(attend_by_heads, 16 // n, op=attention, is_causal=causal) == whole // n
    if causal:
        assert flops(attend_to_both_ends, 16) == whole // n
        assert flops(attend_to_prefix, 16) == 2 * whole * (2 * n - 1) // (2 * n * n)


def test_flops_of_a_recurrent_layer() -> None:
    lstm = torch.nn.LSTM(5, 7, num_layers=2)
    weights = list(lstm.parameters())

    graph = fx.Graph()
    values = [torch.zeros(3, 2, 5), torch.zeros(2, 2, 7), torch.zeros(2, 2, 7), *weights]
    nodes = []
    for index, value in enumerate(values):
        nodes.append(graph.placeholder(f"x{index}"))
        nodes[-1].meta["val"] = value
    flags = (True, 2, 0.0, False, False, False)
    target = torch.ops.aten.lstm.input
    node = graph.call_function(target, (nodes[0], nodes[1:3], nodes[3:], *flags))
    node.meta["val"] = target(values[0], values[1:3], values[3:], *flags)
    # 6 tokens; four gates of 7 from (5 + 7) and from (7 + 7) inputs.
    assert node_flops(node) == 2 * 6 * 4 * 7 * (12 + 14)


def test_other_operators_have_no_flops() -> None:
    assert node_flops(traced(torch.exp, (3, 4))) == 0


def test_bytes() -> None:
    assert node_bytes(traced(torch.add, (3, 4), (3, 4))) == 3 * 48
    assert node_bytes(traced(lambda x: x.view(12), (3, 4))) == 0
    ids = torch.zeros(6, dtype=torch.int64)
    embedding = traced(lambda i, w: F.embedding(i, w), ids, (1000, 4))
    assert node_bytes(embedding) == 6 * 8 + 2 * 6 * 16


def test_symbolic_sizes_count_with_their_hints() -> None:
    graph = make_fx(torch.mm, tracing_mode="symbolic")(torch.zeros(6, 4), torch.zeros(4, 5)).graph
    node = next(n for n in graph.nodes if n.target == torch.ops.aten.mm.default)
    rows = node.meta["val"].shape[0]
    assert isinstance(rows, torch.SymInt)
    assert hint(rows) == 6
    assert node_flops(node) == 2 * 6 * 4 * 5


def test_a_size_known_at_run_time_only_counts_as_one() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        rows = torch.nonzero(torch.zeros(5)).shape[0]
    assert hint(rows) == 1


@pytest.mark.parametrize("name", HARDWARE)
def test_every_machine_is_complete(name: str) -> None:
    machine = cluster(name)
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.int64):
        assert machine.device.peak(dtype) > 0
    assert machine.inside.bandwidth > machine.between.bandwidth
    assert machine.device.memory_bandwidth == machine.inside.copy_bandwidth
    assert hash(machine) == hash(cluster(name))


def test_dtype_classes() -> None:
    assert dtype_class(torch.complex64) == dtype_class(torch.bool) == "float32"
    assert dtype_class(torch.float16) == "half"


def test_unknown_hardware_names_the_closest() -> None:
    with pytest.raises(ValueError, match=r"unknown hardware 'h1000'.*Did you mean 'h100'\?"):
        cluster("h1000")


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("a GPU of next year", "h100"),
    ],
)
def test_the_device_says_what_machine_this_is(
    monkeypatch: pytest.MonkeyPatch, name: str, known: str
) -> None:
    seen = types.SimpleNamespace(name=name, total_memory=40 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: seen)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    here = cluster_of("cuda")
    assert (here.name, here.device.memory_bytes, here.per_node) == (known, 40 << 30, 4)


def test_offline_a_gpu_is_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cluster_of("cuda") == HARDWARE["h100"]
    assert cluster_of("cpu").name == "cpu"
