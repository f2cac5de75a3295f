"""A graph with a cache: no token but through attention looks at others, proven and compared.

Attention that a model writes out is found, and continued by a cache, whatever it adds.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engine_cases as cases
import odd_decoders as odd
from autoshard.export import EngineSpec, ExportError, onnx, tensorrt
from autoshard.export.rank_graph.cache import carrying, check_cached, whole_graph
from autoshard.export.rank_graph.graph import RankGraph
from autoshard.export.rank_graph.operators import attention, update_cache
from autoshard.export.rank_graph.plan import plan_inference
from autoshard.export.rank_graph.weights import read_weights
from autoshard.export.serial_graph import WeightSource
from autoshard.export.to_tensorrt.converters.network import CONVERTERS

aten = torch.ops.aten
LENGTH = 32
SLOW = (torch.float32, torch.bfloat16)
DYNAMIC = {"batch": (1, 2, 4), "sequence": (1, 8, 8)}
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [1, 2, 3], list(range(20, 31))]


def made(model: nn.Module, length: int = LENGTH) -> tuple[RankGraph, Mapping[str, torch.Tensor]]:
    spec = EngineSpec(mesh={"tp": 1}, dynamic=DYNAMIC, max_length=length)
    graph = plan_inference(model, spec).rank_graph(0)
    return graph, read_weights(WeightSource(model), graph)


def greedy(model: nn.Module, steps: int) -> list[list[int]]:
    """What the model says next, without any cache."""
    answers = []
    for prompt in PROMPTS:
        row = list(prompt)
        for _ in range(steps):
            row.append(int(model(torch.tensor([row]))[0, -1].argmax()))
        answers.append(row[len(prompt) :])
    return answers


@pytest.mark.parametrize("kind", odd.RIGHT)
def test_what_a_position_decides_is_looked_up_by_it(kind: type[odd.Decoder]) -> None:
    pytest.importorskip("tensorrt_rtx")
    from autoshard.export.to_tensorrt import generate, networks

    model = kind().eval()
    spec = EngineSpec(mesh={"tp": 1}, dynamic=DYNAMIC, max_length=LENGTH)
    assert generate(networks(model, spec), PROMPTS, 12) == greedy(model, 12)


@pytest.mark.parametrize("kind", odd.REFUSED)
def test_what_looks_at_other_tokens_is_refused_with_its_line(kind: type[odd.Decoder]) -> None:
    with pytest.raises(ExportError, match=rf"({odd.REFUSED[kind]}).*odd_decoders.py:\d+"):
        made(kind().eval())


@pytest.mark.parametrize(
    ("kind", "rows"), [(odd.RotaryTable, 48), (odd.NormedSlice, 47), (odd.Counted, 46)]
)
def test_a_cache_holds_no_more_tokens_than_the_model_has_positions(
    kind: type[odd.Decoder], rows: int
) -> None:
    with pytest.raises(ExportError, match=rf"odd_decoders.py:\d+\). Give max_length={rows}\."):
        made(kind().eval(), 64)


def test_one_length_of_sequence_is_no_length_to_continue() -> None:
    spec = EngineSpec(mesh={"tp": 1}, max_length=LENGTH)
    with pytest.raises(ExportError, match="dynamic={'sequence'"):
        plan_inference(odd.Decoder().eval(), spec).rank_graph(0)


@pytest.mark.parametrize(
    "dtype", [torch.float16, *(pytest.param(d, marks=pytest.mark.slow) for d in SLOW)]
)
def test_rounding_is_no_other_token(dtype: torch.dtype) -> None:
    for rank in range(2):
        check_cached(*cases.rank("llama", 2, rank, dtype, cases.LENGTH))


@functools.cache
def rotary() -> tuple[RankGraph, Mapping[str, torch.Tensor]]:
    return made(odd.RotaryTable().eval())


def calls(graph: RankGraph, target: Any) -> list[Any]:
    return list(graph.module.graph.find_nodes(op="call_function", target=target))


def forget_past(graph: RankGraph) -> None:
    for node in calls(graph, aten._to_copy.default):
        if str(node.args[0].target) == "past_lengths":
            with graph.module.graph.inserting_before(node):
                zero = graph.module.graph.call_function(aten.mul.Tensor, (node.args[0], 0))
            node.args = (zero,)


def see_the_future(graph: RankGraph) -> None:
    calls(graph, attention)[0].kwargs = {"causal": "none", "scale": 8**-0.5}


def see_what_was_filled_in(graph: RankGraph) -> None:
    node = calls(graph, attention)[0]
    node.args = node.args[:4]


def overwrite(graph: RankGraph) -> None:
    node = calls(graph, update_cache)[0]
    with graph.module.graph.inserting_before(node):
        zero = graph.module.graph.call_function(aten.mul.Tensor, (node.args[2], 0))
    node.args = (*node.args[:2], zero)


@pytest.mark.parametrize("plant", [forget_past, see_the_future, see_what_was_filled_in, overwrite])
def test_a_planted_fault_makes_other_tokens(plant: Callable[[RankGraph], None]) -> None:
    graph, weights = rotary()
    graph = dataclasses.replace(graph, module=whole_graph(graph.module))
    check_cached(graph, weights)
    plant(graph)
    graph.module.recompile()
    with pytest.raises(ExportError, match="token [0-9]+ with the cache is not the token"):
        check_cached(graph, weights)


def refused(export: Callable[..., Any], model: odd.Decoder, folder: Path) -> None:
    """The comparison of tokens refuses the export, and nothing is written."""
    with pytest.raises(ExportError, match="with the cache is not the token"):
        export(
            model.eval(),
            folder / "out",
            mesh={"tp": 1},
            dtype="float32",
            dynamic=DYNAMIC,
            max_length=LENGTH,
        )
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        (odd.Mean, aten.mean.dim),
        pytest.param(odd.PrefixSum, aten.cumsum.default, marks=pytest.mark.slow),
    ],
)
def test_what_a_rule_forgets_is_seen_before_anything_is_written(
    kind: type[odd.Decoder], target: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("onnxscript")
    forgotten = None if target is aten.mean.dim else carrying.Place(1)
    monkeypatch.setitem(carrying._RULES, target, lambda self, node: forgotten)
    refused(onnx, kind(), tmp_path)


def test_what_a_converter_forgets_is_seen_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("tensorrt_rtx")
    right = CONVERTERS[attention]

    def without_lengths(low: Any, node: Any) -> Any:
        given, node.args = node.args, node.args[:4]
        try:
            return right(low, node)
        finally:
            node.args = given

    monkeypatch.setitem(CONVERTERS, attention, without_lengths)
    refused(tensorrt, odd.RotaryTable(), tmp_path)


HEADS, WIDTH = 4, 32


class Written(nn.Module):
    """A decoder of one layer, its attention in one of many forms."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form = form
        self.embed, self.head = nn.Embedding(48, WIDTH), nn.Linear(WIDTH, 48)
        self.project, self.sinks = nn.Linear(WIDTH, 3 * WIDTH), nn.Parameter(torch.randn(HEADS))

    def forward(self, ids: Tensor) -> Tensor:
        b, s = ids.shape
        qkv = self.project(self.embed(ids)).view(b, s, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        at = torch.arange(s, device=ids.device)
        seen = at <= at.unsqueeze(1)
        if self.form == "window":
            seen = seen & (at > at.unsqueeze(1) - 3)
        mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
        out = self.attend(q, k, v, mask, at)
        return self.head(out.transpose(1, 2).reshape(b, s, WIDTH))  # type: ignore[no-any-return]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, at: Tensor) -> Tensor:
        if self.form == "alibi":  # heads joined with the batch
            b, h, s, d = q.shape
            slopes = 2.0 ** -torch.arange(1.0, HEADS + 1, device=q.device)
            bias = (slopes[:, None] * at).view(1, HEADS, 1, s).expand(b, -1, -1, -1)
            scores = torch.baddbmm(
                bias.reshape(b * h, 1, s), q.reshape(-1, s, d), k.reshape(-1, s, d).mT, alpha=0.3
            )
            weights = F.softmax(scores.view(b, h, s, s) + mask, -1)
            return torch.bmm(weights.view(b * h, s, s), v.reshape(-1, s, d)).view(b, h, s, d)
        scores = q @ k.transpose(-1, -2) * 0.3
        if self.form == "softcap":
            scores = torch.tanh(scores / 2.0) * 2.0
        if self.form == "row inside cap":
            scores = torch.tanh(scores - scores.amax(-1, keepdim=True)) * 2.0
        if self.form == "filled":
            scores = scores.masked_fill(mask < 0, float("-inf"))
        elif self.form == "filled, counted from the end":  # as MPT: of a row, all are shifted
            slopes = 3.0 ** -torch.arange(1.0, HEADS + 1, device=q.device)
            bias = slopes.view(-1, 1, 1) * (at - at[-1:])
            hidden = torch.finfo(torch.float32).min
            scores = (scores + bias).masked_fill(mask < 0, hidden)
        else:
            scores = scores + mask
        if self.form == "sinks":
            column = self.sinks.view(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], 1)
            scores = torch.cat([scores, column], -1)
            scores = scores - scores.max(-1, keepdim=True).values
            return F.softmax(scores, -1)[..., :-1] @ v
        return F.softmax(scores, -1) @ v


def rank_graph(form: str, **options: Any) -> tuple[RankGraph, Any]:
    model = Written(form).eval()
    spec = EngineSpec(
        mesh={"tp": 1}, dynamic={"batch": (1, 2, 4), "sequence": (1, 8, 8)}, **options
    )
    graph = plan_inference(model, spec).rank_graph(0)
    return graph, read_weights(WeightSource(model), graph)


FILLED = ("filled", "filled, counted from the end")


@pytest.mark.parametrize("form", ["plain", "window", "softcap", "sinks", "alibi", *FILLED])
def test_a_cache_continues_what_was_written_out(form: str) -> None:
    """The whole graph, with which tokens are compared, has attention as the model wrote it."""
    graph, weights = rank_graph(form, max_length=24)
    assert graph.whole is not None
    assert not graph.whole.graph.find_nodes(op="call_function", target=attention)
    found = graph.module.graph.find_nodes(op="call_function", target=attention)
    # no layer has a cap or sinks; these are products and a softmax again, over the cache
    assert len(found) == (0 if form in ("softcap", "sinks") else 1)
    if form in ("plain", "filled"):
        assert found[0].kwargs["causal"] == "lower_right" and found[0].args[3] is None
    check_cached(graph, weights)


def test_what_softmax_does_take_notice_of_is_not_dropped() -> None:
    graph, _ = rank_graph("row inside cap")
    assert not graph.module.graph.find_nodes(op="call_function", target=attention)
