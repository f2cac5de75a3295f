"""The benchmarks compare like with like: every contestant computes the same loss and gradients."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import gpu_report
import run_all
from autoshard.verification.comparison import furthest
from side_by_side import difference_by_norm

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_every_benchmark_is_run_by_make_bench() -> None:
    with_main = {path.stem for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text()}
    assert set(run_all.RUNS) == with_main - {"run_all", "gpu_report"}, "benchmarks/run_all.py"
    assert all("--json" in (BENCHMARKS / f"{name}.py").read_text() for name in run_all.RUNS)


@pytest.mark.parametrize("name", sorted(path.stem for path in BENCHMARKS.glob("*.py")))
def test_a_benchmark_starts(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name that has moved is found here, and not on the machine that measures."""
    module = importlib.import_module(name)
    if name in run_all.RUNS:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
        with pytest.raises(SystemExit, match="^0$"):
            module.main()
        assert "--json" in capsys.readouterr().out


def test_a_section_of_the_gpu_report_costs_its_own_result_only(tmp_path: Path) -> None:
    programs = {
        "good": "import sys; open(sys.argv[1], 'w').write('{\"ms\": 3}'); print('3 ms')",
        "bad": "raise SystemExit('no such kernel')",
        "hangs": "import time; print('begun', flush=True); time.sleep(60)",
    }
    known = {
        name: gpu_report.Section(about=f"a {name} one", command=("-c", code, "{json}"))
        for name, code in programs.items()
    }
    results = {
        name: gpu_report.ran(one, "cpu", tmp_path / f"{name}.json", 3.0)
        for name, one in known.items()
    }
    assert [one["status"] for one in results.values()] == [
        "ok",
        "exit status 1",
        "stopped after 3 s",
    ]
    assert results["good"]["figures"] == {"ms": 3}
    text = gpu_report.markdown(gpu_report.environment("cpu"), results, known)
    for found in (
        "| good | ok |",
        "## bad: a bad one",
        "no such kernel",
        "begun",
        torch.__version__,
    ):
        assert found in text


@pytest.mark.parametrize("devices", [1, 8])
def test_the_programs_of_the_gpu_report_are_there(devices: int) -> None:
    for section in gpu_report.sections(devices).values():
        programs = [part for part in section.command if part.endswith(".py")]
        assert all(Path(part).is_file() for part in programs)
        assert "{json}" in section.command and "{device}" in section.command
    shares = sum(section.share for section in gpu_report.sections(devices).values())
    assert shares < 2  # a section may take more than its part where others take less


def losses_and_gradients(names: list[str]) -> dict[str, tuple[float, float]]:
    """For each contestant, relative to the serial model: differences of loss and gradients."""
    from autoshard import backend
    from autoshard.runtime.mesh import start_world
    from data_parallel import Measured
    from llama_model import Llama, Shape, WithLoss
    from training import contestants

    start_world("cpu")
    torch.manual_seed(0)
    shape = Shape(vocab=64, width=32, hidden=64, layers=1, heads=4, length=16)
    model = Llama(shape)
    ids = torch.randint(shape.vocab, (2, shape.length))
    serial = WithLoss(model)
    want = serial(ids)
    want.backward()
    gradients = [p.grad for p in model.parameters()]
    for p in model.parameters():
        p.grad = None
    compile_local = backend.compile_local
    # what Inductor makes of our graphs is compared in training/test_backend.py
    backend.compile_local = lambda gm, fakes, _, *rest, **more: compile_local(
        gm, fakes, "aot_eager", *rest, **more
    )
    found = {}
    for name in names:
        one = Measured(contestants(model, "")[name]())
        tensor_parallel = one.contestant.rival.startswith("TP")
        loss = one.contestant.call(ids if tensor_parallel else ids.chunk(2)[dist.get_rank()])
        loss.backward()
        value = getattr(loss, "loss", loss).detach()
        value = value.full_tensor() if isinstance(value, DTensor) else value.clone()
        if not tensor_parallel:
            dist.all_reduce(value)
            value /= dist.get_world_size()
        worst = 0.0
        for p, expected in zip(one.contestant.module.parameters(), gradients, strict=True):
            got = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            assert got is not None and expected is not None
            worst = furthest([worst, difference_by_norm(got, expected)])
        found[name] = (abs(float(value) / float(want.detach()) - 1), worst)
    backend.compile_local = compile_local
    return found


EAGER = ["TP by hand eager", "TP+SP by hand eager", "DDP eager", "FSDP2 eager"]


@pytest.mark.slow
def test_contestants_train_the_same_model(gloo2: Any) -> None:
    ours = ["autoshard TP+SP", "autoshard ZeRO-3"]
    for found in gloo2(losses_and_gradients, EAGER + ours):
        assert all(furthest(pair) < 1e-5 for pair in found.values()), found
