"""Processes killed at random moments of a job under torchrun's restarts, beside jobs without kills.

    python benchmarks/restarts.py [--kills 50] [--seed 0] [--json PATH]

examples/elastic.py trains on dp_shard=2 x tp=2, then on two processes, then on four again, twice:
once stopped and started by hand at each change of processes, once with a SIGKILL of a process that
is drawn, at a moment that is drawn (while it starts, or from a step of its on), in each start but
the last. Each start says which checkpoint it went on from; at each of these, and at each checkpoint
written, every rank's parts of parameters and optimizer states are compared, bit for bit, and the
loss of each step.

The starts are those of torchrun's agent (`elastic_launch`), with a small model, and processes that
are forked from one which has compiled it alone before, so that a start takes seconds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import elastic  # noqa: E402

PROCESSES = (4, 2, 4)
EVERY = 2  # steps from a checkpoint to the next
LONGEST = 2 * EVERY  # steps of a start before its kill


class Kill(NamedTuple):
    """The process that ends in one start: in so many seconds, or at a step if it comes first."""

    rank: int
    seconds: float
    step: int
    late: float  # seconds after that step


class Output(NamedTuple):
    loss: torch.Tensor


class Model(nn.Module):
    """A model that is compiled in a second."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Output:
        x = self.embed(input_ids)
        logits = self.head(x + self.down(self.up(x).relu()))
        return Output(nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def warm() -> None:
    """Import and remember here what each process would."""
    elastic.make_model = Model
    torch.set_num_threads(1)  # threads do not outlive a fork
    batch = elastic.batch_of(0, {"dp_shard": 1, "tp": 1}, 0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = torch.compile(model, backend="autoshard", options={"inner": "aot_eager"})
    compiled(**batch).loss.backward()
    optimizer.step()
    torch._dynamo.reset()


class Job(NamedTuple):
    """One run of all worlds."""

    folder: Path
    events: list[dict[str, Any]]
    seconds: float


def ran(folder: Path, steps: Sequence[int], kills: Sequence[Sequence[Kill]]) -> Job:
    """Train to each number of steps on its number of processes, with so many kills."""
    folder.mkdir(parents=True)
    began = time.monotonic()
    for world, (processes, until, own) in enumerate(zip(PROCESSES, steps, kills, strict=True)):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=str(uuid.uuid4()),
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=len(own),
            start_method="fork",
        )
        elastic_launch(config, worker)(folder, world, until, list(own))
    seconds = time.monotonic() - began
    lines = [
        line for path in folder.glob("events-*") for line in path.read_text().splitlines() if line
    ]
    events = sorted(map(json.loads, lines), key=lambda event: event["time"])
    return Job(folder, events, seconds)


def worker(folder: Path, world: int, until: int, kills: Sequence[Kill]) -> None:
    """One process of one start."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the agent's
    start, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])

    def tell(kind: str, **more: Any) -> None:
        event = {"kind": kind, "world": world, "start": start, "rank": rank, "time": time.time()}
        with (folder / f"events-{rank}").open("a") as file:
            file.write(json.dumps({**event, **more}) + "\n")

    if start < len(kills) and kills[start].rank == rank:
        arm(kills[start], folder, tell)
    tell("started")
    record(tell)
    sys.argv = ["elastic.py", "--folder", str(folder), "--steps", str(until)]
    sys.argv += ["--every", str(EVERY), "--inner", "aot_eager"]
    elastic.main()
    tell("done")
    dist.destroy_process_group()


def arm(kill: Kill, folder: Path, tell: Callable[..., None]) -> None:
    """Have this process end at its moment."""

    def end(how: str) -> None:
        begun = [path for path in folder.glob("0*") if path.is_dir()]
        whole = [int(path.name) for path in begun if (path / ".metadata").exists()]
        tell("killed", how=how, whole=max(whole, default=0), writing=len(begun) > len(whole))
        os.kill(os.getpid(), signal.SIGKILL)

    def clock(seconds: float, how: str) -> None:
        timer = threading.Timer(seconds, end, [how])
        timer.daemon = True
        timer.start()

    taken = 0

    def after_step(*_: Any) -> None:
        nonlocal taken
        taken += 1
        if taken == kill.step:
            clock(kill.late, "step")

    clock(kill.seconds, "clock")
    register_optimizer_step_post_hook(after_step)


def record(tell: Callable[..., None]) -> None:
    """Have the example tell which state it goes on from, and which it saves."""
    resume, state_of = elastic.resume, elastic.state_of

    def resumed(model: Any, optimizer: Any, folder: Path) -> int:
        step = resume(model, optimizer, folder)
        state = state_of(model, optimizer) if step else {}
        tell("resumed", step=step, digest=digest(state))
        elastic.state_of = saving
        return step

    def saving(model: Any, optimizer: Any) -> Any:
        state = state_of(model, optimizer)
        tell("saved", step=step_of(state), digest=digest(state))
        return state

    elastic.resume = resumed


def step_of(state: Any) -> int:
    """The optimizer's count of steps; 0 before the first."""
    for path, leaf in pytree.tree_leaves_with_path(state["optimizer"]):
        if pytree.keystr(path).endswith("['step']"):
            return int(leaf)
    return 0


def digest(state: Any) -> str:
    """This rank's parts of all tensors, in one hash."""
    found = hashlib.sha256()
    for path, leaf in pytree.tree_leaves_with_path(state):
        part = leaf.to_local() if isinstance(leaf, DTensor) else leaf
        value = part.detach().numpy().tobytes() if isinstance(part, torch.Tensor) else repr(part)
        found.update(pytree.keystr(path).encode())
        found.update(value if isinstance(value, bytes) else value.encode())
    return found.hexdigest()


def drawn(seed: int, kills: int, startup: Sequence[float], step: float) -> list[list[Kill]]:
    """The kills of each world. startup: seconds in which it starts. step: seconds of one."""
    draw = random.Random(seed)
    worlds: list[list[Kill]] = []
    for world, processes in enumerate(PROCESSES):
        share = kills // len(PROCESSES) + (world < kills % len(PROCESSES))
        worlds.append([])
        for _ in range(share):
            starting = draw.random() < 1 / 3
            seconds = draw.uniform(0, startup[world]) if starting else 1e6
            late = draw.uniform(0, 2 * step)
            kill = Kill(draw.randrange(processes), seconds, draw.randint(1, LONGEST), late)
            worlds[-1].append(kill)
    return worlds


def losses(folder: Path) -> list[tuple[int, str]]:
    """Each step and its loss, in the order in which they were taken."""
    lines = (folder / "losses.txt").read_text().splitlines()
    return [(int(step), loss) for step, loss in map(str.split, lines)]


def startup_seconds(job: Job) -> tuple[list[float], float]:
    """Seconds until each world has taken steps up to its first checkpoint, and those of a step."""
    first, steps = [], []
    for world in range(len(PROCESSES)):
        own = [e for e in job.events if e["world"] == world and e["rank"] == 0]
        saves = [e["time"] for e in own if e["kind"] == "saved"]
        first.append(saves[0] - own[0]["time"])
        steps.append((saves[-1] - saves[0]) / max(1, len(saves) - 1) / EVERY)
    return first, max(steps)


def compared(by_hand: Job, killed: Job) -> dict[str, Any]:
    """Figures of the killed job. Raises AssertionError where it is not what the other is."""

    def states(job: Job) -> dict[tuple[int, int, int], set[str]]:
        found: dict[tuple[int, int, int], set[str]] = {}
        for e in job.events:
            if "digest" in e:
                place = e["world"], e["step"], e["rank"]
                found.setdefault(place, set()).add(e["digest"])
        return found

    expected, found = states(by_hand), states(killed)
    assert all(len(digests) == 1 for digests in expected.values())
    other = [place for place, digests in found.items() if digests != expected[place]]
    assert not other, f"other states than by hand at (world, step, rank) {other[:5]}"
    taken, alone = losses(killed.folder), dict(losses(by_hand.folder))
    assert dict(taken).keys() == alone.keys()
    assert all(alone[step] == loss for step, loss in taken), "a loss differs"
    ends = [e for e in killed.events if e["kind"] == "killed"]
    again, lost = [], []
    for end in ends:
        after = [e for e in killed.events if e["kind"] == "resumed" and e["time"] > end["time"]]
        assert after[0]["step"] >= end["whole"], (end, after[0])
    resumed = [e for e in killed.events if e["kind"] == "resumed" and e["rank"] == 0]
    for (before, _), (step, _) in zip(taken, taken[1:]):
        if step != before + 1:
            lost.append(before + 1 - step)
    for end in ends:
        later = [e["time"] for e in resumed if e["time"] > end["time"]]
        again.append(later[0] - end["time"])
    return {
        "kills": len(ends),
        "while it started": sum(e["how"] == "clock" for e in ends),
        "while a checkpoint was written": sum(e["writing"] for e in ends),
        "starts": len({(e["world"], e["start"]) for e in killed.events}),
        "states compared": len(found),
        "steps": len(alone),
        "steps taken again": sum(lost),
        "most steps lost by a kill": max(lost, default=0),
        "steps between checkpoints": EVERY,
        "longest seconds from a kill to the next start's checkpoint": max(again, default=0.0),
        "seconds beside those by hand": killed.seconds / by_hand.seconds,
    }


def main() -> None:
    """Train, kill, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    warm()
    folder = Path(tempfile.mkdtemp())
    try:
        share = -(-args.kills // len(PROCESSES))
        span = LONGEST * share + 2 * EVERY
        steps = [span * (world + 1) for world in range(len(PROCESSES))]
        by_hand = ran(folder / "by_hand", steps, [[]] * len(PROCESSES))
        startup, step = startup_seconds(by_hand)
        killed = ran(folder / "killed", steps, drawn(args.seed, args.kills, startup, step))
        figures = compared(by_hand, killed)
    finally:
        shutil.rmtree(folder)
    for name, figure in figures.items():
        print(f"{name:60}{figure:10.4g}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
