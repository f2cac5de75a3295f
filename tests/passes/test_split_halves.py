"""split_halves: which part runs on halves, with the serial model's numbers; why not the rest."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from autoshard.config import Config
from autoshard.errors import ConfigError
from autoshard.explain.alternatives import alternatives
from autoshard.mesh_search import search_meshes
from autoshard.program import Program
from autoshard.verification.program_check import verify_program
from finished_ranks import Layers, layers
from halved import by_sequence, found
from model_case import Batch, Case
from models import CASES
from models_dropout import dropped
from traced import WithLoss, programs

HALVES = {"overlap_halves": True}
LLAMA = CASES["llama"]


def logits_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """GPT-2's own loss breaks the graph, by a logger."""
    loss: torch.Tensor = model(batch["input_ids"]).logits.square().mean()
    return loss


def case(one: Case) -> tuple[nn.Module, Batch]:
    return WithLoss(one), one.make_batch(0)


def checked(
    model: nn.Module, batch: Any, tolerance: float = 1e-5, other: Any = None, **options: Any
) -> tuple[Program, Program]:
    """The program whole and on halves, the second of which equals its serial graph."""
    torch.compiler.reset()
    options = {"mesh": {"tp": 2}, **options}
    (plain, program), values = programs(model, (batch,), [options, {**options, **HALVES}])
    others = []
    if other is not None:
        given = {id(batch[name]): other[name] for name in batch}
        others = [[given.get(id(value), value) for value in values]]
    report = verify_program(program, values, others=others)
    assert report.worst[1] < tolerance, report.worst
    assert len(report.gradients) >= sum(isinstance(v, nn.Parameter) for v in values)
    return plain, program


def same_bytes(plain: Program, program: Program) -> bool:
    moved = [sum(c.bytes for c in one.collectives() if c.axis == "tp") for one in (plain, program)]
    return moved[0] == moved[1]


@pytest.mark.parametrize(
    "name,changes",
    [
        ("llama", 10),
        pytest.param("mixtral", 12, marks=pytest.mark.slow),
        pytest.param("vit", 9, marks=pytest.mark.slow),
        pytest.param("bert", 11, marks=pytest.mark.slow),
    ],
)
def test_models_equal_their_serial_graph(name: str, changes: int) -> None:
    """Of two layers, with four changes of state each, and those of head and embedding."""
    plain, program = checked(*case(CASES[name]))
    assert found(program).collectives == changes and not found(program).reason
    assert same_bytes(plain, program)
    assert program.memory().total <= plain.memory().total


def test_dropout_draws_what_the_serial_model_draws() -> None:
    plain, program = checked(*case(dataclasses.replace(dropped("gpt2"), loss=logits_loss)))
    assert found(program).collectives >= 8 and same_bytes(plain, program)


@pytest.mark.slow
def test_a_llama_whose_residual_stream_is_split_equals_its_serial_graph() -> None:
    program = checked(*case(LLAMA))[1]
    plan = by_sequence(lambda *_, **__: program, 2)
    plain, program = checked(*case(LLAMA), plan=plan)
    ops = Counter(c.op for c in program.collectives() if c.phase == "forward")
    assert min(ops["reduce_scatter"], ops["all_gather"]) >= 4
    assert found(program).collectives >= 8 and same_bytes(plain, program)


@pytest.mark.slow
def test_beside_data_parallelism() -> None:
    mesh = {"dp_shard": 2, "tp": 2}
    plain, program = checked(*case(LLAMA), other=LLAMA.make_batch(1), mesh=mesh)
    assert found(program).collectives == 10 and same_bytes(plain, program)


@pytest.mark.slow
def test_beside_lower_precision() -> None:
    """The casts of weights are outside of the halves."""
    precision = {"param": "bfloat16"}
    plain, program = checked(*case(LLAMA), precision=precision, tolerance=5e-2)
    assert found(program).collectives == 10 and same_bytes(plain, program)


def test_a_batch_that_has_no_halves_says_so() -> None:
    """Then what stands between two attentions is cut along the sequence."""
    ids = torch.ones(3, 8, dtype=torch.int64)
    program = checked(WithLoss(LLAMA), {"input_ids": ids, "labels": ids})[1]
    assert 0 < found(program).collectives < 10
    assert "the batch of 3 is not cut in two equal halves" in found(program).reason
    assert "scaled_dot_product_attention" in found(program).reason
    assert "The rest stays whole: the batch of 3" in " ".join(program.explain(200).split())


@pytest.mark.parametrize("tokens,chosen", [(8, False), (4096, True)])
def test_auto_asks_what_it_costs(tokens: int, chosen: bool) -> None:
    """Four layers' all-reduces of eight H100s: of 32 MB each, or of too little to be worth it."""
    options: dict[str, Any] = {"overlap_halves": "auto", "sequence_parallel": False}
    with torch.device("meta"):
        model, shape = Layers(4096).bfloat16(), (2, tokens, 4096)
        build, _ = layers(model, shape, torch.bfloat16)
        program = build({"tp": 8}, **options)
    what = found(program)
    assert what.seconds is not None and bool(what.collectives) == chosen
    assert (what.seconds.halves < what.seconds.whole) == chosen
    assert chosen or "us on halves" in what.reason
    mine = alternatives(program)[0].timing
    plain = alternatives(build({"tp": 8}, sequence_parallel=False))[0].timing
    assert plain.step - mine.step == pytest.approx(what.spared) and (what.spared > 0) == chosen
    if chosen:
        x = torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)
        torch.compiler.reset()
        search = search_meshes(model, (x,), world=8, mesh={"tp": 8}, **options)
        assert search.rows[0].timing.exposed < 0.7 * plain.exposed


def test_what_has_no_graph_to_order_is_refused() -> None:
    with pytest.raises(ConfigError, match="no graph in which collectives are hidden"):
        Config.from_options({"inner": "eager", **HALVES})
    with pytest.raises(ConfigError, match="overlap_halves=1 is not allowed"):
        Config.from_options({"overlap_halves": 1})
