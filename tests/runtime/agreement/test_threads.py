"""Two threads in one sharded model: refused at once on every rank, and never a mixture.

Slow: two that really run, in whatever order.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from autoshard.runtime.agreement.threads import Turn
from models_plain import MLP, Regression, vectors

LIMIT = 4.0


def in_threads(*jobs: Callable[[], Any]) -> list[str]:
    """What each job raises, all of them run at once."""
    from autoshard.runtime import compat

    said = [""] * len(jobs)
    start = threading.Barrier(len(jobs))

    def work(number: int) -> None:
        start.wait()
        try:
            jobs[number]()
        except Exception as error:
            said[number] = str(compat.backend_error(error) or error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


EXITS = """
import contextlib, datetime, time
import torch.distributed as dist
from autoshard.runtime.agreement import history

class Slow:
    def __del__(self): time.sleep(0.5)

def tell():
    with contextlib.suppress(dist.DistError):
        store.wait(["nobody sets it"], datetime.timedelta(seconds=0.2))
    return True

slow, history.LOOK = Slow(), 0.0
store = dist.TCPStore("localhost", 0, is_master=True)
history.CountedRegions(tell).enter(["ranks"], "a region")
time.sleep(0.1)
"""


def test_a_process_exits_well_while_a_thread_of_it_asks_the_store() -> None:
    """Python's end takes longer than the answer, which would come in its midst."""
    done = subprocess.run([sys.executable, "-c", EXITS], stderr=subprocess.PIPE, timeout=120)
    assert done.returncode == 0, done.stderr


def test_threads_are_of_the_kind_that_an_exit_waits_for() -> None:
    """But those that their caller joins, and one that calls nothing of torch."""
    folders = [Path(__file__).parents[3] / name for name in ("runtime", "autoshard", "passes")]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    starts = {path.name for path in files if "threading.Thread(" in path.read_text()}
    assert starts == {"lockstep.py", "local_world.py"}


def test_a_thread_keeps_its_turn_and_others_are_refused() -> None:
    turn = Turn()
    turn.enter("a step")
    turn.enter("a collective in it")
    said = in_threads(lambda: turn.enter("another step"))
    assert "two threads at once" in said[0] and "(another step)" in said[0], said
    assert turn.leave() is None, "it has left the inner one only"
    assert turn.leave() is not None, "the first may have met the second's collectives"
    assert in_threads(lambda: (turn.enter("another step"), turn.leave())) == [""]


def while_in_a_step(what: str) -> list[str]:
    """What another thread raises that calls a model, runs its backward, or compiles one."""
    from autoshard.runtime.agreement.worlds import current_exchange

    torch.manual_seed(0)
    options = {"inner": "aot_eager", "mesh": {"tp": 2}, "timeout": LIMIT}
    step = torch.compile(Regression(MLP()), backend="autoshard", options=options)
    loss = step(**vectors(0))
    loss.backward(retain_graph=True)
    exchange = current_exchange()
    assert exchange is not None
    exchange.enter("a step")
    jobs = {
        "forward": lambda: step(**vectors(0)),
        "backward": loss.backward,
        "compilation": lambda: step(x=torch.ones(6, 8, 64), y=torch.ones(6, 8, 64)),
    }
    said = in_threads(jobs[what])
    try:
        exchange.leave()
    except RuntimeError as error:
        said.append(str(error))
    return said


@pytest.mark.parametrize("what", ["forward", "backward", "compilation"])
def test_another_thread_is_refused_at_once(gloo2: Any, what: str) -> None:
    """And the first hears of it: no rank has entered a collective, so the pool lives on."""
    for second, first in gloo2(while_in_a_step, what):
        assert "two threads at once" in first and "(a step)" in first
        assert second == first or "rank" in second, second


def steps(kind: str, sizes: dict[str, int], inner: str) -> tuple[list[str], list[float]]:
    """What two threads raise that train one model, or call it; and their last losses."""
    torch.manual_seed(0)
    options = {"inner": inner, "mesh": sizes, "timeout": LIMIT}
    step = torch.compile(Regression(MLP()), backend="autoshard", options=options)
    if kind == "warm":
        for _ in range(2):
            step(**vectors(0)).backward()
    losses = [0.0, 0.0]

    def job(number: int) -> None:
        for _ in range(20):
            loss = step(**vectors(number))
            losses[number] = loss.item()
            loss.backward()

    return in_threads(lambda: job(0), lambda: job(1)), losses


@pytest.mark.slow  # the pool has to start again after each
@pytest.mark.parametrize(
    ("kind", "sizes", "inner"),
    [("warm", {"tp": 2}, "aot_eager"), ("cold", {"dp_shard": 2}, "aot_eager")],
)
def test_two_threads_in_one_model(gloo2: Any, kind: str, sizes: dict[str, int], inner: str) -> None:
    try:
        results = gloo2(steps, kind, sizes, inner)
    finally:
        gloo2.stop()  # its connections are broken
    assert all(any(said) for said, _ in results), results
    for said, _ in results:
        for text in filter(None, said):
            assert "two threads at once" in text or "rank" in text, text
