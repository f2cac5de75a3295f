"""Rows of published runs in the words of their file: what is read, what is asked, and two rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import row_table
from autoshard.planning.cost import Link, cluster
from autoshard.planning.estimate import Layout, Profile, SavedForBackward
from published_rows import layout_of, priced, question_of
from repeated_layers import AFTER, BEFORE, Pieces
from row_models import few_layers
from row_table import Outcome, Said, orders, outcomes, proposal, rate, summary
from row_words import Row, machine_of, of_program, program_of, rows_of

ROW: dict[str, Any] = {
    **{"source": "mbridge-x", "model": "small", "machine": "h100", "world": 4, "mesh": {"pp": 4}},
    **{"batch": 1, "length": 100, "checkpointing": "none", "microbatches": 8, "tokens": 1.0},
    **{"schedule": "interleaved", "virtual": 2, "zero": 1},
}


def piece(seconds: float, saved: int = 0) -> Profile:
    return Profile(
        n=1,
        forward=(seconds,),
        backward=(2 * seconds,),
        flops=1.0,
        peak=1.0,
        sent=(),
        weights=(),
        activations=SavedForBackward(saved, 0),
        buffers=0,
    )


def test_a_row_with_an_unknown_word_is_listed_with_it() -> None:
    given = {"machines": {}, "models": {}, "runs": [ROW, {**ROW, "colour": "red"}]}
    (first, why), (_, unknown) = rows_of(given)
    assert first == Row(**ROW) and not why and "colour" in unknown
    found = outcomes(given)
    assert [one.said for one in found] == [None, None]
    assert "no small" in found[0].reason and "colour" in summary(found)


def test_the_words_of_a_row_are_its_question() -> None:
    row = Row(**{**ROW, "mesh": {"pp": 2, "ep": 4, "tp": 2, "dp_replicate": 2}, "lora": True})
    assert question_of(row, "none").axes == (("pp", 2), ("ep", 4), ("tp", 2))
    assert question_of(row, "none").lora == 16
    assert layout_of(row) == Layout(shard=8, zero=1, experts=4, deferred=True, staged=True)
    assert program_of(row).rows.deduplicated
    assert not program_of(replace(row, note="plain all-to-all")).rows.overlap
    h100, rowwise = cluster("h100"), replace(row, float8="rowwise")
    assert of_program(h100, rowwise).efficiency.float8 < of_program(h100, row).efficiency.float8
    with pytest.raises(LookupError, match="nvfp4"):
        of_program(h100, replace(row, float8="nvfp4"))
    assert machine_of("slow", {"slow": {"device": "h100", "power": 0.5}}).efficiency.compute == 0.29
    counted = replace(row, tokens=None, seconds=2.0, microbatches=None)
    with pytest.raises(LookupError, match="micro-batches"):
        _ = counted.steps
    assert rate(replace(row, tokens=None, tflops=5.0), [replace(row, tokens=8.0, tflops=10.0)]) == 4


def test_rows_that_differ_in_a_rate_are_not_priced_by_one_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(row_table, "traced", lambda one, body, row, machine: machine.efficiency)
    traces, row, h100 = row_table.Traces({"small": {}}), Row(**ROW), cluster("h100")
    found: list[Any] = []
    for one in (row, replace(row, float8="tensorwise"), replace(row, float8="rowwise")):
        machine = of_program(h100, one)
        found.append(traces.get(question_of(row, "none"), one, machine))
        assert found[-1] == machine.efficiency
    assert found[0] is found[1] and found[2] != found[1]


def test_the_bubble_and_the_activations_of_interleaved_stages() -> None:
    """Eight equal layers on 4 ranks with 2 stages each, 8 micro-batches: a rank computes 2 layers
    of 3 seconds for each, and waits (p - 1) / v times 6 seconds more. The first rank keeps
    (v - 1) p + 2 (p - 1) + 1 = 11 of a layer at once."""
    row, far = Row(**ROW), Link(0.0, 1e30, 1e30)
    machine = replace(cluster("h100"), inside=far, between=far)
    pieces = Pieces(
        profiles={BEFORE: piece(0.0), "layer": piece(1.0, 10), AFTER: piece(0.0)},
        sent=1,
        buffers=0,
    )
    said = priced(row, pieces, ["layer"] * 8, machine)
    seconds = 8 * 6 + 3 / 2 * 6
    assert said.idle == pytest.approx(3 / (2 * 8 + 3))
    assert said.tokens == pytest.approx(8 * 100 / 4 / seconds)
    assert said.gibibytes * 2**30 == pytest.approx(11 * 10)
    plain = priced(replace(row, schedule="1f1b"), pieces, ["layer"] * 8, machine)
    assert plain.idle == pytest.approx(3 / 11)


def test_the_order_of_layouts_is_counted_by_pairs() -> None:
    fast, slow, other = (Row(**{**ROW, "mesh": {"tp": n}}) for n in (2, 4, 8))
    found = [Outcome(fast, 9.0, Said(8.0, 0.0)), Outcome(slow, 7.0, Said(5.0, 0.0))]
    assert orders(found) == (1, 1)
    assert orders([*found, Outcome(other, 6.0, Said(7.0, 0.0))]) == (2, 3)


def test_a_model_is_a_few_layers_of_each_kind() -> None:
    few = few_layers({"hf": "deepseek-ai/DeepSeek-V3", "experts": 256, "layers": 61}, 4096)
    assert few.kinds == ("dense",) * 3 + ("layer",) * 58 and few.config.n_routed_experts == 256
    assert few.config.num_hidden_layers == few.layers == 4
    whole = few_layers({"hf": "deepseek-ai/DeepSeek-V3", "layers": 61}, 4096, cut=False)
    assert whole.config.num_hidden_layers == 61 and whole.config.first_k_dense_replace == 3
    windows = few_layers({"hf": "openai/gpt-oss-20b", "layers": 24, "experts": 32}, 4096)
    assert len(set(windows.kinds)) == 2 and len(windows.kinds) == 24
    with pytest.raises(LookupError, match="family"):
        few_layers({"hf": "nobody/unknown", "layers": 2}, 128)


def test_the_layout_that_is_proposed_has_the_samples_of_the_row() -> None:
    small = {"vocab": 64, "width": 64, "hidden": 128, "layers": 2, "heads": 4}
    row = Row(**{**ROW, "source": "titan-x", "world": 2, "mesh": {"tp": 2}, "batch": 2})
    mesh, batch, how, tokens, held, why, seconds = proposal(
        row, {"machines": {}, "models": {"small": small}}
    )
    size, times = int(batch.removesuffix("x100")), int(how.split()[0])
    assert size * times * (2 if "dp" in mesh else 1) == 2 * 8
    assert tokens and held and "does" in why and float(seconds) >= 0
    unknown = {"machines": {}, "models": {"small": {"hf": "nobody/unknown"}}}
    assert "no family" in proposal(row, unknown)[-2]


PUBLISHED: list[dict[str, Any]] = [
    {
        **{"source": "nemo-2407", "model": "llama2-13b", "machine": "h100", "world": 16},
        **{"mesh": {"pp": 4, "dp_shard": 4}, "batch": 1, "length": 4096, "microbatches": 32},
        **{"checkpointing": "none", "tokens": 8646, "float8": True, "zero": 1},
        **{"schedule": "interleaved", "virtual": 10},
    },
    {
        **{"source": "mbridge-skills", "model": "qwen3-30b-a3b", "machine": "h100", "world": 16},
        **{"mesh": {"ep": 16}, "batch": 1, "length": 4096, "microbatches": 64, "zero": 1},
        **{"checkpointing": "none", "tokens": 5742.5, "gibibytes": 61.351},
        **{"note": "plain all-to-all dispatcher"},
    },
]
MODELS = {
    "llama2-13b": {
        **{"vocab": 32000, "width": 5120, "hidden": 13824, "layers": 40, "heads": 40},
        **{"heads_kv": 40},
    },
    "qwen3-30b-a3b": {
        **{"hf": "Qwen/Qwen3-30B-A3B", "vocab": 151936, "width": 2048, "hidden": 768},
        **{"layers": 48, "heads": 32, "heads_kv": 4, "head": 128, "experts": 128, "top_k": 8},
    },
}


def test_a_pipeline_and_experts_are_as_published() -> None:
    found = outcomes({"machines": {}, "models": MODELS, "runs": PUBLISHED})
    assert [one.reason for one in found] == ["", ""]
    assert all(abs(one.error) < 0.2 for one in found)
    said = found[1].said
    assert said is not None and abs(said.gibibytes / 61.351 - 1) < 0.2
