"""The demo and what the README shows, run as a reader would run them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def readme_example() -> str:
    """The first Python block of the README."""
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def run_readme_example(source: str) -> list[float]:
    """Losses the example prints, and bytes of a parameter that must be sharded."""
    import contextlib
    import io

    import torch
    from torch.distributed.tensor import DTensor

    printed = io.StringIO()
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    with contextlib.redirect_stdout(printed):
        exec(compile(source, "README.md", "exec"), names)
    weights = [p for p in names["model"].parameters() if isinstance(p, DTensor)]
    whole = sum(p.numel() for p in weights)
    assert whole and sum(p.to_local().numel() for p in weights) < 0.6 * whole
    return [float(line.split()[1]) for line in printed.getvalue().splitlines()]


def test_readme_example(gloo2: Any) -> None:
    source = readme_example()
    assert len([line for line in source.splitlines() if line.strip()]) == 12
    first, second = gloo2(run_readme_example, source)
    assert first == second
    assert len(first) == 3 and first[-1] < first[0]


def test_readme_graphs_are_what_the_example_prints() -> None:
    command = [sys.executable, "examples/see_inside.py"]
    printed = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True).stdout
    blocks = re.findall(r"```text\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        assert block.strip() in printed


@pytest.mark.slow
def test_demo_agrees_with_serial() -> None:
    command = "-m torch.distributed.run --standalone --nproc-per-node 2 examples/train_llama.py"
    done = subprocess.run(
        [sys.executable, *command.split(), "--steps", "3", "--inner", "aot_eager"],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.strip().splitlines()
    assert lines[-1].startswith("The loss curves agree: worst relative difference")
    steps = [line for line in lines if re.search(r"step \d/3 .*serial .*relative", line)]
    assert len(steps) == 3
    shares = re.findall(r"rank \d: .* MiB, ([\d.]+)% of the model", done.stdout)
    assert len(shares) == 2 and all(49 < float(share) < 60 for share in shares)
