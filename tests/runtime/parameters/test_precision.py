"""Precision: wire dtypes from the graphs, and values against a serial model that casts alike."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import autoshard
from autoshard.config import Precision
from autoshard.errors import ConfigError
from autoshard.runtime.collectives.axis import Axis
from autoshard.runtime.collectives.lockstep import run_ranks
from autoshard.runtime.collectives.redistribution import reduce_wide
from autoshard.verification.comparison import furthest
from joined_batch import Sizes, part
from side_by_side import difference, whole
from token_net import Net, batch

DDP = {"dp_replicate": 2}
FSDP = {"dp_shard": 2}
B16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@functools.cache
def wires(mesh: tuple[tuple[str, int], ...], precision: Precision, micro: str) -> set[Any]:
    """(phase, collective, axis, dtype) of all collectives, of scalars excepted."""
    program = autoshard.trace(
        Net(), (batch(0),), mesh=dict(mesh), precision=precision, microbatch=micro, zero=1
    )
    return {
        (c.phase, c.op, c.axis, source.meta["val"].dtype)
        for c in program.collectives()
        for source in c.node.all_input_nodes
        if c.axis != "tp"
    }


GATHER, SCATTER = ("forward", "all_gather", "dp_shard"), ("backward", "reduce_scatter", "dp_shard")
REDUCE = ("backward", "all_reduce", "dp_replicate")
BOTH = {"dp_replicate": 2, "dp_shard": 2}
SHARDS = {"dp_shard": 2, "ep": 2}


def on_ep(of: tuple[str, str, str]) -> tuple[str, str, str]:
    return (*of[:2], "ep")


@pytest.mark.parametrize(
    ("mesh", "precision", "expected"),
    [
        (FSDP, Precision(), {(*GATHER, F32), (*SCATTER, F32)}),
        (FSDP, Precision(param=B16), {(*GATHER, B16), (*SCATTER, B16)}),
        (FSDP, Precision(param=B16, reduce=F32), {(*GATHER, B16), (*SCATTER, F32)}),
        (FSDP, Precision(reduce=B16), {(*GATHER, F32), (*SCATTER, B16)}),
        (
            FSDP,
            Precision(param=B16, accumulate=F32),
            {(*GATHER, B16), ("backward", "all_to_all", "dp_shard", B16)},
        ),
        (DDP, Precision(param=F16, reduce=F32), {(*REDUCE, F32)}),
        (
            DDP,
            Precision(param=B16, accumulate=F32),
            {
                ("backward", "all_to_all", "dp_replicate", B16),
                ("backward", "all_gather", "dp_replicate", B16),
            },
        ),
        (BOTH, Precision(param=B16), {(*GATHER, B16), (*SCATTER, B16), (*REDUCE, B16)}),
        ({**FSDP, "tp": 2}, Precision(param=B16, reduce=F32), {(*GATHER, B16), (*SCATTER, F32)}),
        *(
            (
                SHARDS,
                Precision(param=B16, reduce=reduce),
                {(*of, B16) for of in (GATHER, on_ep(GATHER))}
                | {(*of, reduce or B16) for of in (SCATTER, on_ep(SCATTER))},
            )
            for reduce in (None, F32)
        ),
        ({"tp": 2}, Precision(param=B16, reduce=F32), set()),
    ],
)
@pytest.mark.parametrize("micro", ["single", "flush"])
def test_dtypes_on_the_wire(
    mesh: Sizes, precision: Precision, expected: set[Any], micro: str
) -> None:
    assert wires(tuple(mesh.items()), precision, micro) == expected


def test_tracing_leaves_the_model_as_it_was() -> None:
    model = Net()
    before = [(type(m), set(m.__dict__)) for m in model.modules()]
    program = autoshard.trace(model, (batch(0),), mesh=FSDP, precision={"param": "bfloat16"})
    assert [(type(m), set(m.__dict__)) for m in model.modules()] == before
    assert not any(p.__dict__ for p in model.parameters())
    plain = autoshard.trace(Net(), (batch(0),), mesh=FSDP).memory(inner="aot_eager")
    memory = program.memory(inner="aot_eager")
    assert (memory.parameters, memory.gradients) == (plain.parameters, plain.gradients)


@pytest.mark.parametrize(
    "value", [{"param": "int8"}, {"compute": "bfloat16"}, {"param": torch.int32}, "bfloat16", 16]
)
def test_what_is_not_a_precision(value: Any) -> None:
    with pytest.raises(ConfigError, match="precision=.* is not allowed.*param, reduce, accumulate"):
        autoshard.Config(precision=value)


def test_names_and_dtypes_are_the_same() -> None:
    assert Precision.of({"param": "float16", "reduce": F32}) == Precision(F16, F32)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("state", ["I", "S(0)", "S(1)"])
def test_the_wide_sum(n: int, state: str) -> None:
    """1 + many small numbers: a sum in bf16 loses them, the wide one does not."""
    parts = [torch.full((7, 5), 1.0 if rank == 0 else 2.0**-9, dtype=B16) for rank in range(n)]

    def rank(axis: Axis) -> torch.Tensor:
        return reduce_wide(parts[axis.rank], state, axis, F32)

    results = run_ranks(n, rank)
    exact = torch.stack(parts).float().sum(0)
    if state == "I":
        assert all(torch.equal(each, exact.to(B16)) for each in results)
    else:
        assert all(each.dtype is F32 for each in results)
        assert torch.equal(torch.cat(results, int(state[2])), exact)


def serial_gradients(model: nn.Module, step: int, ranks: int, option: Any) -> list[Any]:
    """What the ranks' gradients become: computed in `param`, summed as the options say."""
    precision = Precision.of(option.get("precision"))
    reduce = precision.reduce or precision.param or F32
    each = []
    for rank in range(ranks):
        low = {
            k: p.detach().to(precision.param or p.dtype).requires_grad_(p.requires_grad)
            for k, p in model.named_parameters()
        }
        ids = batch(step).chunk(ranks)[rank]
        torch.func.functional_call(model, low, (ids,)).backward()
        scale = 1 if option.get("gradients", {}).get("reduction") == "sum" else ranks
        each.append([None if p.grad is None else p.grad.to(reduce) / scale for p in low.values()])
    total = []
    for grads in zip(*each):
        if grads[0] is None:
            total.append(None)
            continue
        wide = precision.accumulate or reduce
        total.append(sum(g.to(wide) for g in grads[1:]) + grads[0].to(wide))
    return total


def run(sizes: Sizes, options: dict[str, Any], micro: int) -> dict[str, Any]:
    from autoshard.runtime.mesh import data_coordinate, init_mesh

    mesh = init_mesh(sizes, "cpu")
    rank, ranks = data_coordinate(mesh), mesh.size // mesh.axis("tp").size
    model, serial = Net(), Net()
    compiled: Any = torch.compile(
        model, backend="autoshard", options={"mesh": sizes, "inner": "aot_eager", **options}
    )
    expected: list[Any] = [None] * len(list(serial.parameters()))
    for step in range(micro):
        grads = serial_gradients(serial, step, ranks, options)
        with autoshard.no_sync(compiled) if step + 1 < micro else mock.MagicMock():
            compiled(batch(step).chunk(ranks)[rank]).backward()
        expected = [g if e is None else e + g for e, g in zip(expected, grads)]
    worst, exact = 0.0, True
    for p, want in zip(model.parameters(), expected):
        assert p.dtype is F32 and (p.grad is None) == (want is None)
        if p.grad is not None:
            assert isinstance(p.grad, DTensor) and p.grad.dtype is F32
            got = whole(p.grad)
            exact = exact and torch.equal(got, want.float())
            worst = furthest([worst, difference(got, want.float())])
    eager = float(whole(compiled._orig_mod(batch(0)).detach()))
    low = {k: p.to(p.dtype) for k, p in serial.named_parameters()}
    return {
        "exact": exact,
        "worst": worst,
        "programs": len(autoshard.programs(model)),
        "weight": str(model.up.weight.dtype),
        "eager": abs(eager - float(torch.func.functional_call(serial, low, (batch(0),)).detach())),
    }


@pytest.mark.parametrize(
    ("sizes", "options", "micro"),
    [
        (FSDP, {"precision": {"param": "bfloat16", "reduce": "float32"}}, 1),
        (FSDP, {"precision": {"param": "bfloat16", "accumulate": "float32"}}, 1),
        pytest.param(DDP, {"precision": {"param": "bfloat16"}}, 1, marks=pytest.mark.slow),
        pytest.param(
            *(DDP, {"precision": {"param": "float16", "reduce": "float32"}}, 3),
            marks=pytest.mark.slow,
        ),
        (FSDP, {"precision": {"param": "bfloat16", "reduce": "float32"}, "zero": 1}, 3),
        pytest.param(FSDP, {"gradients": {"reduction": "sum"}}, 1, marks=pytest.mark.slow),
        (DDP, {"gradients": {"reduction": "sum"}, "inner": "eager"}, 2),
        pytest.param(
            *(SHARDS, {"precision": {"param": "bfloat16", "reduce": "float32"}, "zero": 1}, 3),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_against_a_serial_model_that_casts(
    gloo2: Any, gloo4: Any, sizes: Sizes, options: dict[str, Any], micro: int
) -> None:
    pool = gloo4 if len(sizes) == 2 else gloo2
    for result in pool(run, sizes, options, micro):
        # two ranks: the sum has one order; fp32 alone is added up in whichever order is cheaper
        some = "precision" not in options or len(sizes) == 2
        assert result["exact"] or some and result["worst"] < 1e-6, result
        if "precision" in options:
            assert result["weight"] == "torch.float32"
        assert result["eager"] < 0.05, result


def twice(sizes: Sizes) -> str:
    model = Net()
    for precision in (None, {"param": "bfloat16"}):
        options = {"mesh": sizes, "inner": "eager", "precision": precision}
        compiled: Any = torch.compile(model, backend="autoshard", options=options)
        try:
            compiled(part({"ids": batch(0)}, 2, 0)["ids"])
        except Exception as error:
            return str(error)
    return ""


def test_one_model_has_one_precision(gloo2: Any) -> None:
    assert all("the same precision" in said for said in gloo2(twice, FSDP))


def ratio(sizes: Sizes) -> float:
    """The gradient error of bf16 under tp over that of serial bf16; both to fp32."""
    model, truth, low = Net(), Net(), Net().to(B16)
    options = {"mesh": sizes, "inner": "aot_eager", "precision": {"param": "bfloat16"}}
    compiled: Any = torch.compile(model, backend="autoshard", options=options)
    for each in (compiled, truth, low):
        each(batch(0)).backward()
    ours = serial = 0.0
    for p, q, r in zip(model.parameters(), truth.parameters(), low.parameters()):
        if q.grad is not None and p.grad is not None and r.grad is not None:
            assert p.grad.dtype is F32
            ours += float((whole(p.grad) - q.grad).square().sum())
            serial += float((r.grad.float() - q.grad).square().sum())
    return (ours / serial) ** 0.5


def test_tensor_parallel_is_as_precise_as_one_device(gloo2: Any) -> None:
    assert all(0 < each < 1.5 for each in gloo2(ratio, {"tp": 2}))


def test_a_world_of_one() -> None:
    """No mesh, no shards: the same casts, and fp32 gradients."""
    model, serial = Net(), Net()
    options = {"inner": "aot_eager", "precision": {"param": "bfloat16"}}
    compiled: Any = torch.compile(model, backend="autoshard", options=options)
    with autoshard.no_sync(compiled):  # nothing waits where there is nobody to wait for
        compiled(batch(0)).backward()
    assert [p.dtype for p in model.parameters()] == [F32] * len(list(model.parameters()))
    for p, want in zip(model.parameters(), serial_gradients(serial, 0, 1, options)):
        assert (p.grad is None) == (want is None)
        if p.grad is not None:
            assert p.grad.dtype is F32
            torch.testing.assert_close(p.grad, want.float(), rtol=1e-2, atol=1e-4)
    assert model.up.weight is dict(model.named_parameters())["up.weight"]
