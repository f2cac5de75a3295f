"""New shapes, modes and graphs of a model that is sharded already."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoshard
from autoshard.verification.comparison import furthest
from models_plain import MLP
from side_by_side import Pair, check, difference

WIDTH, VOCAB = 64, 512


class Block(nn.Module):
    """An embedding, an attention block and an MLP, each after a norm, and a head; the loss."""

    def __init__(self, batch_norm: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = MLP(WIDTH, 4 * WIDTH)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        qkv = self.qkv(self.norms[0](h)).unflatten(-1, (3, 4, WIDTH // 4))
        q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.out(a.transpose(1, 2).flatten(2))
        h = h + self.mlp(self.norms[1](h))
        if not self.training:
            h = h * 0.5  # eval is another graph
        logits = self.head(self.norms[2](h))
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def ids(step: int, rows: int = 4, length: int = 32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCAB, (rows, length), generator=generator)


def split_sizes(program: Any) -> int:
    """How many values of a program are split along a symbolic size."""
    from autoshard.runtime.collectives.states import shard_dim

    found = 0
    for node, strategy in program.decisions.strategies.items():
        if isinstance(strategy.output, str) and (dim := shard_dim(strategy.output)) is not None:
            found += not isinstance(node.meta["val"].shape[dim], int)
    return found


def shapes(sizes: list[tuple[int, int]], activation_byte: float | None = None) -> dict[str, Any]:
    """Train on batches of these sizes: the programs after each, which one ran, how it splits.

    activation_byte: the price of a kept activation, to make sequence parallelism worth it.
    """
    from autoshard import backend
    from autoshard.building import one_rank as build
    from autoshard.planning import Prices

    pair = Pair(Block())
    counts: list[int] = []
    ran: list[int] = []
    runner = backend._runner

    def recorded(*args: Any) -> Any:
        run, number = runner(*args), len(autoshard.programs(pair.model)) - 1
        return torch.compiler.disable(lambda *values: (ran.append(number), run(*values))[1])

    backend._runner = recorded
    prices, request = Prices(activation_byte=activation_byte), build.Request
    build.Request = lambda **given: request(**{**given, "prices": prices})  # type: ignore[assignment,misc]
    try:
        for step, (rows, length) in enumerate(sizes):
            batch = ids(step, rows, length)
            pair.train([lambda m, b=batch: m(b)])
            counts.append(pair.programs())
    finally:
        build.Request = request  # type: ignore[misc]
        backend._runner = runner
    split = [split_sizes(program) for program in autoshard.programs(pair.model)]
    return {**pair.result(), "counts": counts, "ran": ran, "split": split}


def test_batch_sizes(gloo2: Any) -> None:
    results = gloo2(shapes, [(2, 32), (2, 32), (3, 32), (4, 32), (7, 32)])
    check(results, share=0.9)
    counts = results[0]["counts"]
    assert counts[0] == counts[1] == 1 and counts[-1] <= 3, counts
    assert results[0]["counts"] == results[1]["counts"]


@pytest.mark.slow
def test_sequence_lengths_of_a_sequence_sharded_plan(gloo2: Any) -> None:
    """Even lengths run the variant that splits the sequence, odd ones another."""
    lengths = [32, 48, 33, 64, 35, 50]
    results = gloo2(shapes, [(1, length) for length in lengths], 1e-6)
    check(results, share=0.9)
    for result in results:
        # static 32; symbolic and even; symbolic and odd; then nothing new
        assert result["counts"] == [1, 2, 3, 3, 3, 3], result
        assert result["ran"] == [0, 1, 2, 1, 2, 1], result
        assert result["split"][1] > 5 and result["split"][2] <= 1, result


def modes(first: str) -> dict[str, Any]:
    """Training, eval under no_grad and inference_mode, in an order; one gradient check each."""
    pair = Pair(Block())
    placements = []

    def where() -> list[str]:
        return [str(p.placements) for p in pair.model.parameters()]

    def train(step: int) -> None:
        pair.model.train()
        pair.serial.train()
        pair.train([lambda m: m(ids(step))])
        placements.append(where())

    def evaluate(mode: Any, step: int) -> None:
        pair.model.eval()
        pair.serial.eval()
        with mode():
            pair.forward(lambda m: m(ids(step)))
        placements.append(where())

    if first == "train":
        train(0)
    for step, mode in enumerate([torch.no_grad, torch.inference_mode, torch.no_grad]):
        evaluate(mode, step)
    counts = pair.programs()
    train(1)
    train(2)
    evaluate(torch.no_grad, 3)
    evaluate(torch.inference_mode, 4)
    return {
        **pair.result(),
        "moved": any(p != placements[0] for p in placements),
        "grew": pair.programs() - counts,
    }


def test_train_eval_and_inference_mode(gloo2: Any) -> None:
    results = gloo2(modes, "train")
    check(results, share=0.9)
    assert not any(r["moved"] or r["grew"] for r in results), results


def test_eval_first(gloo2: Any) -> None:
    """The placement is chosen by a graph without gradients, and training obeys it."""
    results = gloo2(modes, "eval")
    check(results, share=0.9)
    assert not any(r["moved"] for r in results), results
    assert all(r["grew"] == 1 for r in results), results


class TwoWays(nn.Module):
    """Two methods that read the same weights, one of which is read by another graph alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.other = MLP(WIDTH, 4 * WIDTH), MLP(WIDTH, 4 * WIDTH)

    def forward(self, x: torch.Tensor, way: int) -> torch.Tensor:
        if way == 0:
            return self.body(x).square().mean()
        if way == 1:
            return self.body(self.other(x)).square().mean()
        return self.body(x[:, :1]).mean()


def several_graphs() -> dict[str, Any]:
    pair = Pair(TwoWays())
    x = torch.randn(4, 8, WIDTH, generator=torch.Generator().manual_seed(1))
    seen = []
    for way in (0, 2, 1, 0):
        # a forward and backward alone: the weights of `other` have no gradient in way 0
        pair.backward(lambda m, way=way: m(x, way))
        pair.compare_gradients()
        seen.append([str(p.placements) for p in pair.model.body.parameters()])
    return {**pair.result(), "moved": any(s != seen[0] for s in seen)}


def test_a_parameter_seen_by_several_graphs_stays_where_it_is(gloo2: Any) -> None:
    results = gloo2(several_graphs)
    check(results, share=0.9)
    assert not any(r["moved"] for r in results), results
    assert results[0]["programs"] == 3


class Scaled(nn.Module):
    """Takes a Python float, and has one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.slope = 0.1

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        hidden = F.leaky_relu(self.up(x), self.slope) * scale
        return (self.down(hidden) / (scale + 1)).square().mean()


def changing_floats(dynamic: bool | None) -> list[tuple[float, int]]:
    """The largest difference from the serial model, and the programs, for each of three floats."""
    model = Scaled()
    serial = copy.deepcopy(model)
    options = {"mesh": {"tp": 2}, "inner": "aot_eager"}
    compiled = torch.compile(model, backend="autoshard", options=options, dynamic=dynamic)
    found = []
    for rows, scale in ((4, 0.5), (6, 0.25), (6, 0.75)):
        x = torch.randn(rows, WIDTH)
        for each, call in ((model, compiled), (serial, serial)):
            each.zero_grad()
            call(x, scale).backward()
        pairs: Any = zip(model.parameters(), serial.parameters())
        worst = furthest(difference(p.grad, q.grad, 1.0) for p, q in pairs)
        found.append((worst, len(autoshard.programs(model))))
    return found


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_float_that_changes_is_a_constant_of_each_program(gloo2: Any, dynamic: bool) -> None:
    for found in gloo2(changing_floats, dynamic):
        assert furthest(worst for worst, _ in found) < 1e-6
        assert [programs for _, programs in found] == [1, 2, 3]
