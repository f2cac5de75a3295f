"""`autoshard.verify` and its command: equal, different, and failing, through gloo processes."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import weight_norm

import autoshard
import faults
import jobs
import mistakes
from autoshard.cli import main
from autoshard.errors import ConfigError
from autoshard.export.rank_graph.traced_model import shadow
from autoshard.model_source import copied
from autoshard.runtime.randomness import draw_for
from autoshard.verification import comparison as measuring
from autoshard.verification import local_world
from autoshard.verification.comparison import Comparison
from autoshard.verification.local_world import WorldError
from autoshard.verification.proof import Proof, worst
from autoshard.verification.subject import Run, Subject, chunks
from models_hf import sequence_parallel_llama


@pytest.mark.slow
def test_equal_with_dropout() -> None:
    """The serial model draws the masks of the mesh; everything is compared at both steps."""
    said: list[str] = []
    proof = autoshard.verify(
        faults.dropping, mesh={"tp": 2}, steps=2, progress=lambda what, *_: said.append(what)
    )
    assert proof.ok, proof
    kinds = {one.kind for one in proof.comparisons}
    assert kinds == {"loss", "output", "gradient", "parameter", "capture"}
    names = dict(faults.model()[0].named_parameters())
    for kind in ("gradient", "parameter"):
        assert {one.name for one in proof.comparisons if one.kind == kind} == set(names)
    assert {one.placement for one in proof.comparisons if one.name == "up.weight"} == {
        "tp Shard(0)"
    }
    assert "EQUAL: mesh tp=2, 2 steps" in str(proof) and "drew those of the mesh" in str(proof)
    assert said[0] == "starting 3 processes"
    assert {"serial model: step 2 of 2", "2 ranks: step 2 of 2"} <= set(said)


def test_the_serial_model_draws_for_each_data_parallel_rank() -> None:
    """Two ranks with equal batches have masks apart, at every step, compiled once."""
    subject = Subject(source=faults.dropping)
    model, args, kwargs = subject.load()
    options = {"rng": "invariant", "inner": "aot_eager"}
    call = torch.compile(model, backend="autoshard", options=options)
    run = Run(subject, model, call, {0: (args, kwargs), 1: (args, kwargs)}, 0.1)
    try:
        for step in range(2):
            found = run.step(step)
            assert not torch.equal(found["loss", "loss", 0], found["loss", "loss", 1])
    finally:
        draw_for(0)


def test_a_fault_through_processes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the command, from the name of a factory that plants the fault where it is called; all the
    others are planted in one process, by test_planted_faults.py."""
    assert main(["verify", "faults:gradient_nan", "--mesh", "tp=2"]) == 1
    told = capsys.readouterr()
    assert "DIFFERENT: mesh tp=2" in told.out and "WRONG" in told.out
    right = [line for line in told.out.splitlines() if line.startswith(("loss", "output"))]
    assert not any("WRONG" in line for line in right), told.out
    assert "starting 3 processes" in told.err


def test_a_rank_that_fails_between_calls() -> None:
    """Rank 0 is in the collectives of its backward: nobody waits, and the culprit is named."""
    started = time.monotonic()
    with pytest.raises(WorldError) as caught:
        autoshard.verify(
            faults.model, mesh={"tp": 2}, loss=mistakes.fails_between_calls, steps=2, timeout=500.0
        )
    assert str(caught.value).startswith("rank 1 of 3 processes failed")
    assert "ArithmeticError: a mistake in the training loop of rank 1" in str(caught.value)
    assert time.monotonic() - started < 250.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        ({"dp_shard": 2, "tp": 2}, {"steps": 3}),
        ({"dp_replicate": 2}, {"dtype": torch.bfloat16}),
        ({"tp": 2}, {"inner": "inductor"}),
        ({"tp": 1}, {}),
        ({"pp": 2}, {"pipeline": {"schedule": "zb1"}}),
    ],
)
def test_equal(mesh: dict[str, int], settings: dict[str, Any]) -> None:
    proof = autoshard.verify(faults.dropping, mesh=mesh, **settings)
    assert proof.ok, proof


@pytest.mark.slow
def test_ranks_that_make_different_models() -> None:
    with pytest.raises(WorldError, match="disagree on the plan.*layer_norm.*0.001"):
        autoshard.verify(mistakes.other_model_on_rank_1, mesh={"tp": 2})


SESSION = """
import torch, autoshard
class Mine(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
    def forward(self, x):
        return self.down(self.up(x).relu())
model = Mine()
proof = autoshard.verify(model, (torch.randn(4, 8),), mesh={"tp": 2}, loss=lambda y: y.mean())
print(proof)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["session", "script"])
def test_models_of_a_session_and_of_an_unguarded_script(how: str, tmp_path: Path) -> None:
    """Their classes live in __main__, which other processes cannot import."""
    script = tmp_path / "script.py"
    script.write_text(SESSION)
    done = subprocess.run(
        [sys.executable, "-" if how == "session" else str(script)],
        input=SESSION,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert "EQUAL: mesh tp=2" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0


def test_worlds_end() -> None:
    assert local_world.run(jobs.by_role, ["a", "bb"], 60) == {"a": 1, "bb": 2}
    with pytest.raises(WorldError, match="raise of 2 processes failed") as caught:
        local_world.run(jobs.by_role, ["sleep", "raise"], 60)
    assert "KeyError: 'no such thing'" in str(caught.value)
    with pytest.raises(WorldError, match=r"die of 2 processes died \(exit code 3\)"):
        local_world.run(jobs.by_role, ["die", "sleep"], 60)
    with pytest.raises(WorldError, match="^sleep of 1 processes did not end in 5 seconds") as late:
        local_world.run(jobs.by_role, ["sleep"], 5)
    assert "in by_role" in str(late.value), "its stack is shown"


def test_forked_worlds_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that cannot be pickled."""
    base = 40
    assert local_world.run(lambda role, folder: base + len(role), ["aa"], 60) == {"aa": 42}

    def fails(role: str, folder: Path) -> None:
        assert "RANK" not in os.environ
        raise KeyError("no such thing")

    monkeypatch.setenv("RANK", "7")
    with pytest.raises(WorldError, match="a of 1 processes failed"):
        local_world.run(fails, ["a"], 60)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["faults:none", "--mesh", "tp=2"], "'faults:none' cannot be found"),
        (["faults:SEQ", "--mesh", "tp=2"], "'faults:SEQ' is a int, not a function"),
        (["faults:model", "--mesh", "tpp=2"], "mesh={'tpp': 2} is not allowed"),
        (["faults:model", "--mesh", "tp=2", "--option", "meshh=1"], "unknown autoshard option"),
    ],
)
def test_wrong_usage(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *arguments]) == 2
    assert told in capsys.readouterr().err


def test_rounding_is_told_from_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(measuring.FLOORS, torch.float32, 1e-8)  # rounding alone is more
    proof = autoshard.verify(faults.model, mesh={"tp": 2}, processes=False)
    assert proof.ok and proof.notes[1].startswith("float64: in the model's own dtype, ")
    fault = faults.FAULTS["mean_for_sum"]
    monkeypatch.setattr(fault.place, fault.name, fault.faulty)
    proof = autoshard.verify(faults.model, mesh={"tp": 2}, processes=False)
    assert not proof.ok and len(proof.notes) == 1


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_a_model_that_holds_a_result_of_autograd() -> None:
    """deepcopy refuses the weight that torch.nn.utils.weight_norm computed, and any kept result."""
    model: Any = nn.Sequential(weight_norm(nn.Linear(8, 16)), nn.ReLU(), nn.Linear(16, 8))
    model.last = [model(torch.randn(2, 8))]
    proof = autoshard.verify(model, (torch.randn(4, 8),), mesh={"tp": 2}, processes=False)
    assert proof.ok, str(proof)
    copy: Any = copied(model)
    assert copy[0].weight is not model[0].weight and not copy.last[0].requires_grad
    assert not shadow(model, None)[0].last[0].requires_grad  # what an export traces


@pytest.mark.slow
@pytest.mark.parametrize("data", ["dp_shard", "dp_replicate"])
def test_sequence_and_data_parallel(data: str) -> None:
    """The norms' gradients are reduced over both axes."""
    proof = autoshard.verify(sequence_parallel_llama, mesh={data: 2, "tp": 2})
    assert proof.ok, str(proof)


def test_threads_run_no_pipeline() -> None:
    with pytest.raises(ConfigError, match=r"pp=2 .*Leave processes=False out"):
        autoshard.verify(faults.model, mesh={"pp": 2}, processes=False)


def test_a_mesh_is_needed() -> None:
    assert main(["verify", "faults:model"]) == 2


def test_the_worst_comes_first_and_decides() -> None:
    fine = Comparison(
        kind="gradient", name="a", placement="tp I", error=1e-7, tolerance=1e-5, step=1, rank=0
    )
    again = dataclasses.replace(fine, error=2e-6, rank=1)
    wrong = Comparison(kind="output", name="b", error=float("nan"), tolerance=1e-5, step=2, rank=1)
    found = worst([fine, again, wrong])
    assert found == [wrong, again]
    assert not Proof({"tp": 2}, tuple(found), 1).ok
    assert not Proof({"tp": 2}, (), 1).ok, "nothing was compared"
    assert Proof({"tp": 2}, (fine,), 1).ok


def test_the_table_fits_80_columns_and_names_keep_their_end() -> None:
    name = "model.encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    row = Comparison(kind="parameter", name=name, placement="tp S(0)", error=1e-7, tolerance=1e-5)
    wrong = dataclasses.replace(row, name="a", error=1.0)
    lines = str(Proof({"tp": 2}, (row, wrong), 1)).split("\n")
    assert max(map(len, lines)) <= 80, lines
    assert "  ..." in lines[2] and "bias.weight  tp S(0)" in lines[2], lines


def test_chunks_of_a_batch() -> None:
    batch = ((torch.arange(4), 7), {"mask": torch.ones(3, 3), "y": torch.arange(8).view(4, 2)})
    (first, one), (second, two) = chunks(batch, 2)
    assert first[0].tolist() == [0, 1] and second[0].tolist() == [2, 3] and first[1] == 7
    assert one["mask"].shape == (3, 3) and two["y"].tolist() == [[4, 5], [6, 7]]
    with pytest.raises(ConfigError, match="a batch of 4 rows cannot be split over 3"):
        chunks(batch, 3)


def test_losses_that_are_found() -> None:
    x = torch.ones(3, requires_grad=True)
    subject = Subject(source=None)
    assert subject.loss_of({"loss": x.sum(), "y": x}).item() == 3.0
    assert subject.loss_of((x * 2).sum()).item() == 6.0
    noise = torch.autograd.grad(subject.loss_of((x, [x * 2])), x)[0]
    assert noise.unique().numel() == 3, "every element has a weight of its own"
    assert Subject(source=None, loss=lambda y: y[0]).loss_of(x).item() == 1.0
    with pytest.raises(ConfigError, match="has no loss and no tensor"):
        subject.loss_of({"a": 1})
