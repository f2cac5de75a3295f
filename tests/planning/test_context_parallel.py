"""Context parallelism: the axis cp shards sequences, stores weights by rows, and attends by
all-to-alls of heads or to gathered keys and values."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoshard.building.batch_check import batch_facts
from autoshard.building.one_rank import build_program
from autoshard.capture import intercept
from autoshard.config import Config
from autoshard.explain import explain
from autoshard.planning.context_parallel import contiguous_share
from autoshard.planning.cost.clusters import cluster
from autoshard.planning.cost.model import ring_bytes
from autoshard.planning.operators import ATTENTION, packet
from autoshard.program import Program
from autoshard.runtime.collectives.axis import Axis
from autoshard.runtime.collectives.redistribution import convert
from autoshard.runtime.collectives.states import I, S, Z
from autoshard.runtime.mesh import offline_mesh
from autoshard.runtime.operators.attention import attend_to_both_ends, attend_to_prefix
from autoshard.verification.program_check import verify_program
from models import CASES
from side_by_side import Pair

Mesh = Mapping[str, int]


def programs(
    model: nn.Module,
    batches: Sequence[Mapping[str, Any]],
    meshes: Sequence[Mesh],
    machine: str,
    **options: Any,
) -> tuple[list[Program], list[list[Any]]]:
    """The programs of a model on meshes, of one trace, and its inputs by batch."""
    made: list[Program] = []
    values: list[list[Any]] = []

    def plan(gm: Any, example: Sequence[Any], inputs: list[Any]) -> Any:
        values.append([int(e) if i.real is None else i.real for i, e in zip(inputs, example)])
        for mesh in meshes if len(values) == 1 else meshes[:1]:
            config, at = Config.from_options({"mesh": mesh, **options}), offline_mesh(mesh, 0)
            facts = batch_facts(inputs)
            one = build_program(gm, example, inputs, at, config, cluster(machine), facts=facts)
            if len(values) == 1:
                made.append(one)
        return one

    for batch in batches:
        intercept(model, (), batch, plan)
    return made, values


def model_of(name: str) -> nn.Module:
    model: Any = CASES[name].make_model()
    model.loss_type = "ForCausalLM"  # it would log that it guesses, and break the graph
    return model  # type: ignore[no-any-return]


def padded(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with each row padded on the left by as many tokens as its number."""
    ids = batch["input_ids"]
    mask = (torch.arange(ids.shape[1]) >= torch.arange(len(ids))[:, None]).long()
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, -100),
    }


def packed(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with rows of two documents, of which the first has 5 tokens more than the number of
    the row."""
    rows, length = batch["input_ids"].shape
    at, start = torch.arange(length), torch.arange(rows)[:, None] + 5
    return {**batch, "position_ids": torch.where(at < start, at, at - start)}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *(("llama", dict), ("llama", padded), ("gpt2", dict), ("gemma3", packed)),
        pytest.param("qwen3", dict, marks=pytest.mark.slow),
    ],
)
def test_a_model_on_cp_is_the_serial_one(name: str, change: Callable[..., Any]) -> None:
    batch = change(CASES[name].make_batch(0))
    for program in (found := programs(model_of(name), [batch], [{"cp": 2}, {"cp": 4}], "cpu"))[0]:
        assert verify_program(program, found[1][0]).worst[1] < 1e-5
        strategies = program.decisions.strategies
        for node, stored in program.decisions.stored.items():
            assert node.meta["val"].dim() < 2 or stored == S(0)
        attention = [s for n, s in strategies.items() if packet(n) in ATTENTION]
        assert attention and all(one.output in (S(1), S(2), Z(2)) for one in attention)


def test_cp_goes_with_the_data_parallel_axes() -> None:
    case, meshes = CASES["llama"], [{"dp_shard": 2, "cp": 2}, {"dp_replicate": 2, "cp": 2}]
    made, values = programs(model_of("llama"), [case.make_batch(i) for i in (0, 1)], meshes, "cpu")
    for program in made:
        assert verify_program(program, values[0], others=values[1:]).worst[1] < 1e-5


class Attention(nn.Module):
    """Projections of a sequence, and attention of `heads` to `shared` keys and values."""

    def __init__(self, heads: int, shared: int, width: int, causal: bool) -> None:
        super().__init__()
        self.shape, self.causal = (heads, shared, width), causal
        self.q, self.o = (nn.Linear(heads * width, heads * width, bias=False) for _ in "qo")
        self.k, self.v = (nn.Linear(heads * width, shared * width, bias=False) for _ in "kv")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the squares of the result."""
        heads, shared, width = self.shape
        q = self.q(x).unflatten(-1, (heads, width)).transpose(1, 2)
        k, v = (w(x).unflatten(-1, (shared, width)).transpose(1, 2) for w in (self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2)).square().mean()


@functools.cache
def attention_on(n: int, heads: int, shared: int, causal: bool, length: int = 65536) -> Program:
    with torch.device("meta"):
        model = Attention(heads, shared, 64, causal).to(torch.bfloat16)
        x = torch.empty(1, length, heads * 64, dtype=torch.bfloat16)
    return programs(model, [{"x": x}], [{"cp": n}], "h100")[0][0]


def form_of(program: Program) -> str:
    """Of the attention of a program: "heads" (Ulysses), or "rows" (gathered keys and values)."""
    (found,) = (s for n, s in program.decisions.strategies.items() if packet(n) in ATTENTION)
    return {S(1): "heads", S(2): "rows"}[found.output]  # type: ignore[index]


def sent(program: Program) -> collections.Counter[str]:
    """Bytes that a rank sends for what is split along a dim but the rows of weights, by phase."""
    found: collections.Counter[str] = collections.Counter()
    for one in program.collectives():
        if "S(0)" not in one.change and one.op != "all_reduce":  # the loss
            found[one.phase] += round(ring_bytes(one.op, one.bytes, program.axis.size))
    return found


@pytest.mark.parametrize(("heads", "shared", "n"), [(16, 8, 2), (16, 8, 4), (16, 16, 8)])
def test_a_layer_sends_the_bytes_of_the_formulas(heads: int, shared: int, n: int) -> None:
    program = attention_on(n, heads, shared, causal=False)
    one = 65536 * 64 * 2  # bytes of one head
    gathered = 2 * one * shared * (n - 1) / n
    exchanged = (2 * heads + 2 * shared) * one / n * (n - 1) / n
    form = form_of(program)
    assert sent(program)["forward"] == {"rows": gathered, "heads": exchanged}[form]
    # gathered keys and values are kept until backward, which scatters their gradients
    assert sent(program)["backward"] == {"rows": gathered, "heads": exchanged}[form]


@pytest.mark.parametrize(("heads", "shared"), [(16, 8), (32, 8)])
def test_the_cheaper_form_of_attention_is_taken(heads: int, shared: int) -> None:
    """Keys and values are gathered below 1 + heads / shared heads ranks, heads exchanged above."""
    threshold = 1 + heads / shared
    for n in (2, 4, 8):
        expected = "heads" if n > threshold else "rows"
        assert form_of(attention_on(n, heads, shared, causal=False)) == expected, n


def test_of_two_planned_axes_cp_is_the_first() -> None:
    both = offline_mesh({"dp_shard": 3, "cp": 2, "tp": 2}, 0)
    assert both.outer is not None
    assert [axis.name for axis in (both.outer, both.planned)] == ["cp", "tp"]
    assert (both.sharing, both.batches) == ((both.outer, both.planned), 3)
    assert offline_mesh({"cp": 2, "tp": 1}, 0).planned.name == "cp"
    assert offline_mesh({"dp_shard": 2}, 0).planned.name == "tp"


def seen_by(attend: Any, state: str, n: int) -> list[int]:
    """How many keys the query rows of each rank see, all together."""
    found = []
    for rank in range(n):
        axis = Axis("cp", n, rank, "")
        query = convert(torch.zeros(1, 1, 64, 8), I, state, axis)
        # rows attend alike to all they see: a one for each key, divided by how many there are
        result = attend(query, torch.ones(1, 1, 64, 8), torch.eye(64)[None, None], axis=axis)
        found.append(int((1 / result.amax(-1)).round().sum()))
    return found


def test_causal_work_is_the_same_on_every_rank_in_head_tail_order() -> None:
    every = 64 * 65 // 2
    assert seen_by(attend_to_both_ends, Z(2), 4) == [every // 4] * 4
    contiguous = seen_by(attend_to_prefix, S(2), 4)
    assert sum(contiguous) == every
    assert contiguous[-1] == pytest.approx(contiguous_share(4) * every / 4, rel=0.02)


@pytest.mark.parametrize("outputs", ["lazy", "dtensor"])
def test_a_region_is_in_head_tail_order_where_all_of_it_can_be(outputs: str) -> None:
    """Not where the logits leave as a DTensor, which knows no such order."""
    batch = {name: value[:1] for name, value in CASES["llama"].make_batch(0).items()}
    made, values = programs(model_of("llama"), [batch], [{"cp": 4}], "cpu", outputs=outputs)
    strategies = made[0].decisions.strategies
    attention = {s.impl for n, s in strategies.items() if packet(n) in ATTENTION}
    assert attention == {attend_to_both_ends if outputs == "lazy" else attend_to_prefix}
    assert bool(made[0].decisions.unbalanced) is (outputs == "dtensor")
    assert verify_program(made[0], values[0]).worst[1] < 1e-5
    if outputs == "dtensor":
        assert "times the mean, since an output leaves" in explain(made[0], compiled=False)
    else:
        again = programs(model_of("llama"), [batch], [{"cp": 4}], "cpu", plan=made[0].plan)[0]
        assert again[0].plan.text() == made[0].plan.text()


def test_a_length_that_twice_the_ranks_do_not_divide_stays_contiguous() -> None:
    batch = {name: value[:1, :6] for name, value in CASES["llama"].make_batch(0).items()}
    made, values = programs(model_of("llama"), [batch], [{"cp": 2}], "cpu")
    assert "4 does not divide the rows" in made[0].decisions.unbalanced[0]
    assert verify_program(made[0], values[0]).worst[1] < 1e-5


def test_lengths_that_change_are_split() -> None:
    """Symbolic ones in contiguous parts."""
    batch = CASES["llama"].make_batch(0)
    longer = {name: torch.cat([value, value], 1) for name, value in batch.items()}
    made: list[Program] = []

    def plan(gm: Any, example: Sequence[Any], inputs: list[Any]) -> Any:
        values = [int(e) if i.real is None else i.real for i, e in zip(inputs, example)]
        config, at = Config.from_options({"mesh": {"cp": 2}}), offline_mesh({"cp": 2}, 0)
        made.append(build_program(gm, example, inputs, at, config, cluster("cpu")))
        assert verify_program(made[-1], values).worst[1] < 1e-5
        return made[-1]

    model = model_of("llama")
    for one in (batch, longer):
        intercept(model, (), one, plan)
    assert [bool(one.decisions.unbalanced) for one in made][0] is False


def train_on_cp() -> dict[str, Any]:
    """Losses and gradients of two checkpointed steps, and logits, beside the serial model's."""
    from torch.distributed.tensor import DTensor

    model: Any = CASES["llama"].make_model()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    batches = [CASES["llama"].make_batch(seed) for seed in (0, 1)]
    short = [{name: value[:1] for name, value in batch.items()} for batch in batches]
    pair = Pair(model, mesh={"cp": 2})
    pair.train([lambda m, b=b: m(**b).loss for b in short])
    ids = short[0]["input_ids"]
    pair.forward(lambda m: m(input_ids=ids, labels=ids).logits)
    stored = {str(p.placements) for p in model.parameters() if isinstance(p, DTensor)}
    return {"loss": pair.loss, "gradient": pair.gradient, "share": pair.share(), "stored": stored}


def test_training_on_cp_is_serial_training(gloo2: Any) -> None:
    for found in gloo2(train_on_cp):
        assert found["loss"] < 1e-5 and found["gradient"] < 1e-5, found
        assert found["share"] > 0.9
        assert found["stored"] <= {"(Shard(dim=0),)", "(Replicate(),)"}


def other_batches() -> str:
    import torch.distributed as dist

    pair = Pair(CASES["llama"].make_model(), mesh={"cp": 2})
    batch = CASES["llama"].make_batch(dist.get_rank())
    with pytest.raises(Exception, match="batch") as raised:
        pair.compiled(**batch)
    return str(raised.value)


def test_ranks_of_cp_are_given_one_batch(gloo2: Any) -> None:
    for told in gloo2(other_batches):
        assert "cp" in told
