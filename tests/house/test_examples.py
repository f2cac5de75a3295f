"""The examples, each on two processes beside the same on one."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from autoshard.export.rank_graph.files import digest
from autoshard.verification.comparison import furthest

ROOT = Path(__file__).parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
FOUR_STEPS = ("--steps", "4", "--inner", "aot_eager")
EXAMPLES = ("custom_model", "hf_trainer", "lora", "inference")

pytestmark = pytest.mark.slow


def run(name: str, *options: str, processes: int = 2, **environment: str) -> str:
    """What rank 0 prints."""
    if name == "lora":
        pytest.importorskip("peft")
    if name == "hf_trainer":
        pytest.importorskip("accelerate")
    if name == "trl_grpo":
        pytest.importorskip("trl")
    start = (*TORCHRUN, str(processes)) if processes > 1 else ()
    command = [sys.executable, *start, f"examples/{name}.py", *options]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        text=True,
        capture_output=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@functools.cache
def serial_run(name: str) -> str:
    """What the example prints on one process, without autoshard."""
    return run(name, *FOUR_STEPS, "--serial", processes=1)


def numbers(line: str, text: str) -> list[float]:
    """The numbers that `line`, an expression with a group, finds in what an example printed."""
    return [float(value) for value in re.findall(rf"^{line}", text, re.MULTILINE)]


def losses(printed: str) -> list[float]:
    """The losses of the steps."""
    return [float(loss) for loss in re.findall(r"^step \d+ loss ([\d.]+)", printed, re.MULTILINE)]


def test_custom_model_trains_like_on_one_process() -> None:
    sharded = run("custom_model", *FOUR_STEPS)
    assert "autoshard: tp=2, " in sharded and "\nDearest: " in sharded
    assert losses(sharded) == pytest.approx(losses(run("custom_model", *FOUR_STEPS, processes=1)))
    assert len(losses(sharded)) == 4 and losses(sharded)[-1] < losses(sharded)[0]


def test_lora_trains_like_the_serial_model() -> None:
    sharded = run("lora", *FOUR_STEPS)
    assert losses(sharded) == pytest.approx(losses(serial_run("lora")), rel=1e-4)
    assert len(losses(sharded)) == 4
    held, total = re.search(r"^frozen: rank 0 holds (\d+) of (\d+)", sharded, re.M).groups()  # type: ignore[union-attr]
    assert int(held) < 0.6 * int(total)


def test_trl_learns_from_answers_of_a_generator_with_its_weights() -> None:
    """A step moves the weights by which the next answers are made: the example checks the version
    that the generator has got. Each step tells its reward."""
    printed = run("trl_grpo", "--steps", "2", "--inner", "aot_eager")
    assert len(numbers(r"step \d+ reward ([\d.]+)", printed)) == 2, printed


def stopped(folder: Path, axis: str) -> None:
    """The Trainer example, terminated some time after its checkpoint of step 4."""
    command = [sys.executable, *TORCHRUN, "2", "examples/hf_trainer.py", "--folder", str(folder)]
    command += ["--axis", axis, "--inner", "aot_eager", "--steps", "100000"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    until, last = time.monotonic() + 300, folder / "checkpoint-4" / "trainer_state.json"
    while not last.exists():
        assert process.poll() is None and time.monotonic() < until, "no checkpoint"
        time.sleep(0.1)
    process.terminate()
    process.wait(60)
    for later in folder.glob("checkpoint-*"):  # half of one, perhaps
        if int(later.name.split("-")[1]) > 4:
            shutil.rmtree(later)


@pytest.mark.parametrize(("first", "second"), [("tp", "dp_shard"), ("dp_shard", "tp")])
def test_trainer_is_stopped_and_resumes_on_another_mesh(
    tmp_path: Path, first: str, second: str
) -> None:
    """Losses, norms and evaluations of eight steps, and the model that was saved, are serial's."""
    from transformers import LlamaForCausalLM

    pytest.importorskip("accelerate")
    rest = ("--steps", "8", "--inner", "aot_eager")
    serial = run("hf_trainer", "--folder", str(tmp_path / "s"), *rest, "--serial", processes=1)
    stopped(tmp_path / "t", first)
    folder = ("--folder", str(tmp_path / "t"))
    sharded = run("hf_trainer", *folder, *rest, "--axis", second, "--resume")
    for line in (r"step \d+ loss ([\d.]+)", r"step .* norm ([\d.]+)", r"evaluated .*: ([\d.]+)"):
        assert numbers(line, sharded) == pytest.approx(numbers(line, serial), rel=1e-3), line
        assert len(numbers(line, sharded)) == (4 if "eval" in line else 8)
    assert "compiled 2 graphs" in sharded and "compiled 0 graphs" in serial  # train, evaluate
    models = [LlamaForCausalLM.from_pretrained(tmp_path / k / "best") for k in "ts"]
    with torch.no_grad():
        logits = [model(torch.arange(64).view(2, 32)).logits for model in models]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-4)


def test_trainer_keeps_the_autocast_of_bf16(tmp_path: Path) -> None:
    """Without which it would train in float32, and say nothing."""
    pytest.importorskip("accelerate")
    short = ("--steps", "2", "--serial", "--folder", str(tmp_path))
    rounded, exact = (
        losses(run("hf_trainer", *short, *flag, processes=1)) for flag in (("--bf16",), ())
    )
    assert rounded != exact and rounded == pytest.approx(exact, rel=1e-2)


def test_inference_gives_the_same_text() -> None:
    sharded = run("inference", "--inner", "aot_eager")
    serial = run("inference", "--serial", processes=1)
    rows = [re.findall(r"^tokens (.*)$", text, re.MULTILINE) for text in (sharded, serial)]
    assert rows[0] == rows[1] and len(rows[0]) == 2
    logits = [re.findall(r"-?\d\.\d{5}", text) for text in (sharded, serial)]
    assert [*map(float, logits[0])] == pytest.approx([*map(float, logits[1])], abs=2e-5)
    assert re.search(r"compiled [1-9]\d* graphs", sharded)


def test_the_policy_of_the_loop_learns_and_its_generator_follows() -> None:
    """Rewards rise, and with each step's weights both models say the same, which they do not with
    those of the step before. Half of the weights travel each step."""
    printed = run("rl_loop", "--steps", "8", "--inner", "aot_eager")
    rows = re.findall(r"^step \d+ reward ([\d.]+) apart (\S+), a step later (\S+);", printed, re.M)
    rewards, apart, stale = ([float(row[i]) for row in rows] for i in range(3))
    assert len(rows) == 8 and sum(rewards[-3:]) > sum(rewards[:3])
    assert furthest(apart) < 1e-5 and all(difference > 1e-3 for difference in stale)
    received, copied = map(int, re.findall(r"received (\d+) bytes, copied (\d+)", printed)[0])
    assert received < 0.6 * (received + copied)


def test_unsharded_runs_the_model_unsharded() -> None:
    plain = run("lora", *FOUR_STEPS, AUTOSHARD_UNSHARDED="1")
    assert losses(plain) == pytest.approx(losses(serial_run("lora")))
    held, total = re.search(r"^frozen: rank 0 holds (\d+) of (\d+)", plain, re.M).groups()  # type: ignore[union-attr]
    assert held == total


def test_one_process_exports_for_many_ranks(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="builds the engines")
    printed = run("export_single_device", str(tmp_path), processes=1)
    for name in ("engines/rank1.engine", "huggingface/config.json", "trtllm/rank3.safetensors"):
        assert f"  {name}\n" in printed


def test_every_rank_exports_what_it_holds(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="builds the engines")
    printed = run("export_distributed", str(tmp_path))
    for name in ("engines/rank1.engine", "huggingface/config.json", "trtllm/rank1.safetensors"):
        assert f"  {name}\n" in printed
    config = json.loads((tmp_path / "engines" / "config.json").read_text())
    gathered = load_file(tmp_path / "huggingface" / "model.safetensors")
    sharded = 0
    for rank, entry in enumerate(config["ranks"]):
        for name, weight in entry["weights"].items():
            part = gathered[name]
            if weight["state"] != "I":
                part = part.chunk(2, int(weight["state"][2:-1]))[rank]
                sharded += 1
            assert weight["sha256"] == digest(part), name
    assert sharded > len(gathered)  # most of both ranks' weights


def test_what_was_trained_is_what_the_engines_say(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="builds the engines")
    import transformers

    printed = run("train_then_export", str(tmp_path), processes=4)
    prompt, answer = re.search(r"^(.*)\[(.*)\]$", printed, re.M).groups()  # type: ignore[union-attr]
    letters = sorted(set(re.search(r'TEXT = "(.*)"', example("train_then_export"))[1]))  # type: ignore[index]
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "huggingface")
    row = [letters.index(letter) for letter in prompt]
    for _ in range(40):
        with torch.no_grad():
            row.append(int(model(torch.tensor([row])).logits[0, -1].argmax()))
    assert "".join(letters[token] for token in row[len(prompt) :]) == answer
    assert sorted(p.name for p in (tmp_path / "engines").iterdir()) == [
        "config.json",
        "rank0.engine",
        "rank1.engine",
    ]


def example(name: str) -> str:
    """The text of an example."""
    return (ROOT / "examples" / f"{name}.py").read_text()


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_short(name: str) -> None:
    most = 110 if name == "hf_trainer" else 80  # it also saves and resumes
    assert len((ROOT / "examples" / f"{name}.py").read_text().splitlines()) <= most
