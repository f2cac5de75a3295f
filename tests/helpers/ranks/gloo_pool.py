"""A pool of processes that live as long as the test session and form one gloo world.

Importing torch takes seconds, so starting processes for each test would dominate the suite. The
workers see the environment torchrun would give them and no process group: the code under test
starts it, as it does for a user.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

#: Seconds. Code of Inductor that no cache holds takes two minutes here, beside another test.
TIMEOUT = 600.0
GRACE = 10.0  # what the other ranks get to finish once one has failed
PRELOADED = ["autoshard", "torch._dynamo", "transformers.modeling_utils"]
"""What every worker imports is imported once: pools that start anew cost forks, not imports."""
COLLECTION = (100_000, 20, 100)  # objects made, younger collections: before one by themselves


class WorkerTraceback(Exception):
    """The traceback of a worker, shown as the cause of the exception raised in the test."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class PoolError(RuntimeError):
    """A worker died or did not answer; the pool was killed and starts again at the next use."""


class GlooPool:
    """`pool(fn, *args, **kwargs)` runs fn in every worker and returns the results by rank."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._stacks: list[Path] = []

    def __call__(
        self, fn: Callable[..., Any], *args: Any, pool_timeout: float = TIMEOUT, **kwargs: Any
    ) -> list[Any]:
        """Run a top-level function of an importable module on all ranks.

        An exception is raised here as it was in the lowest rank that failed, with the worker's
        traceback. Raises PoolError, with the workers' stacks, where a worker dies or is silent
        for `pool_timeout` seconds.
        """
        if not self._processes:
            self._start()
        call = pickle.dumps((fn, args, kwargs))
        for pipe in self._pipes:
            pipe.send_bytes(call)
        answers = self._collect(time.monotonic() + pool_timeout)
        errors = [(rank, answer) for rank, answer in answers.items() if answer[0] == "error"]
        if errors:
            if len(errors) < self.size:
                self.stop()  # the other ranks are elsewhere in the sequence of collectives
            rank, (_, error, text) = min(errors)
            raise error from WorkerTraceback(f"rank {rank} of {self.size}: {text}")
        return [answers[rank][1] for rank in range(self.size)]

    def stop(self) -> None:
        """Kill the workers."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        for stack in self._stacks:
            stack.unlink(missing_ok=True)
        self._processes, self._pipes, self._stacks = [], [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            handle, name = tempfile.mkstemp(prefix=f"autoshard-rank{rank}-", suffix=".stack")
            os.close(handle)
            process = context.Process(
                target=_serve, args=(theirs, rank, self.size, port, name), daemon=True
            )
            process.start()
            theirs.close()  # so that a dead worker is an end of file here
            self._processes.append(process)
            self._pipes.append(ours)
            self._stacks.append(Path(name))

    def _collect(self, deadline: float) -> dict[int, tuple[Any, ...]]:
        answers: dict[int, tuple[Any, ...]] = {}
        while len(answers) < self.size:
            waiting = {self._pipes[r]: r for r in range(self.size) if r not in answers}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                if any(answer[0] == "error" for answer in answers.values()):
                    return answers
                self._fail(f"ranks {sorted(waiting.values())} of {self.size} gave no answer")
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    if not any(answer[0] == "error" for answer in answers.values()):
                        self._processes[rank].join(GRACE)
                        code = self._processes[rank].exitcode
                        self._fail(f"rank {rank} of {self.size} died (exit code {code})")
                    return answers
                if answers[rank][0] == "error":
                    deadline = min(deadline, time.monotonic() + GRACE)
        return answers

    def _fail(self, what: str) -> None:
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1.0)  # faulthandler writes from the signal handler; nothing tells us when
        stacks = "\n".join(
            f"--- rank {rank}\n{path.read_text()}" for rank, path in enumerate(self._stacks)
        )
        self.stop()
        raise PoolError(f"{what}\n{stacks}")


def _serve(pipe: Connection, rank: int, size: int, port: int, stack_file: str) -> None:
    """The life of a worker: calls from the pipe, answers to the pipe, until it closes."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
        TORCHINDUCTOR_COMPILE_THREADS="1",  # daemons may have no children
    )
    stacks = open(stack_file, "w")  # noqa: SIM115 (open as long as the process)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    faulthandler.enable(file=stacks)
    gc.set_threshold(*COLLECTION)
    import torch

    torch.set_num_threads(1)
    reach = None
    if "REACH" in os.environ:  # planting/reach.py
        from planting.reach import RankReach

        reach = RankReach()
    while True:
        try:
            call = pipe.recv_bytes()
        except (EOFError, KeyboardInterrupt):
            return
        answer = _answer(call)
        if reach is not None:
            reach.leave()
        pipe.send_bytes(answer)


def _answer(call: bytes) -> bytes:
    import torch

    torch.manual_seed(0)
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    if torch.distributed.is_initialized():  # on all ranks, or on none
        from autoshard.runtime.agreement import worlds

        if worlds.current_exchange() is not None:
            worlds.renew()  # the failure of an earlier job is none of this one
    try:
        fn, args, kwargs = pickle.loads(call)
        return pickle.dumps(("result", fn(*args, **kwargs)))
    except Exception as error:
        text = traceback.format_exc()
        error.__traceback__ = None
        try:
            answer = pickle.dumps(("error", error, text))
            pickle.loads(answer)  # some exceptions pickle, and do not come back
            return answer
        except Exception:
            return pickle.dumps(("error", RuntimeError(f"{type(error).__name__}: {error}"), text))
    finally:
        gc.collect(1)  # what this job made: a look at all the modules' objects takes 0.3 s
