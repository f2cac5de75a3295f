"""A world of local processes for one job: started, watched, and ended, whatever they do.

Each process runs `job(role, folder)` and leaves a result file; the first that fails is the one
whose traceback is raised, and nobody outlives the time limit or the caller.

Processes are started afresh and the job travels as a pickle. What cannot travel (a class of an
interactive session or of the running script, a lambda) is inherited: the process is forked.
"""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autoshard.errors import AutoshardError

Job = Callable[[str, Path], Any]

GRACE = 5.0
"""Seconds the others get to end by themselves once one process has failed."""
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # several processes share few cores
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class WorldError(AutoshardError):
    """A process of a local world failed, died, or did not end in time."""


def run(
    job: Job, roles: Sequence[str], timeout: float, progress: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """The results of `job(role, folder)`, each role in a process of its own.

    folder: a directory all processes share while they live. timeout: seconds for all of it.
    progress: called with each line that a process hands to `report`.

    Raises WorldError with the traceback of the process that failed first, or with the stacks of
    those that were still running at the time limit; none is left running.
    """
    with tempfile.TemporaryDirectory(prefix="autoshard-") as name:
        folder = Path(name)
        start = _starter(job, folder)
        processes: dict[str, Any] = {}
        try:
            for role in roles:
                processes[role] = start(role)
            return _watch(processes, folder, timeout, progress or (lambda line: None))
        finally:
            for process in processes.values():
                if _code(process) is None:
                    process.kill()
                _join(process)


def report(folder: Path, line: str) -> None:
    """Tell the caller of `run`, from inside a job, how far it is."""
    with (folder / "progress").open("a") as file:
        file.write(line + "\n")


def _starter(job: Job, folder: Path) -> Callable[[str], Any]:
    payload = _travels(job)
    if payload is None:
        return lambda role: _fork(job, role, folder)
    (folder / "job").write_bytes(payload)
    return lambda role: _start(role, folder)


def _travels(job: Job) -> bytes | None:
    """The job's pickle, or None where another process could not read it."""
    try:
        payload = pickle.dumps(job)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        if not hasattr(os, "fork"):
            raise WorldError(
                f"the model cannot be sent to another process: {error}",
                remedy="Put it into a module that can be imported.",
            ) from error
        return None
    return None if b"__main__" in payload and hasattr(os, "fork") else payload


def _start(role: str, folder: Path) -> subprocess.Popen[bytes]:
    environment = {k: v for k, v in os.environ.items() if k not in _TORCHRUN}
    # the package, and what the job's pickle names, may be found on the caller's path only
    environment["PYTHONPATH"] = os.pathsep.join([os.getcwd(), *filter(None, sys.path)])
    with (folder / f"{role}.log").open("wb") as log:
        return subprocess.Popen(
            # this file and not the module, whose package would be imported, torch and all, before
            # the process watches its parent; -P: without the file's folder on the path
            [sys.executable, "-P", __file__, str(folder), role],
            env={**environment, **_ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _fork(job: Job, role: str, folder: Path) -> Any:
    process = multiprocessing.get_context("fork").Process(
        target=_forked, args=(job, role, folder), daemon=False
    )
    with warnings.catch_warnings():
        # the child starts no thread of the parent's pools, and computes on one thread
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    return process


def _forked(job: Job, role: str, folder: Path) -> None:
    for name in _TORCHRUN:
        os.environ.pop(name, None)
    os.environ.update(_ENVIRONMENT)
    with (folder / f"{role}.log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    import torch

    torch.compiler.reset()
    torch.set_num_threads(1)  # the parent's pool of threads does not exist here
    serve(role, folder, job)
    os._exit(0)  # nothing that the parent registered to run at its exit runs here


def serve(role: str, folder: Path, job: Job | None = None) -> None:
    """The life of one process."""
    _end_with_parent()
    with (folder / f"{role}.stack").open("w") as stacks:
        if hasattr(signal, "SIGUSR1"):
            faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        try:
            if job is None:
                job = pickle.loads((folder / "job").read_bytes())
            answer = pickle.dumps(("result", job(role, folder)))
        except BaseException as error:
            told = (type(error).__name__, str(error), traceback.format_exc())
            answer = pickle.dumps(("error", told))
        part = folder / f"{role}.part"
        part.write_bytes(answer)
        part.rename(folder / f"{role}.result")
        if hasattr(signal, "SIGUSR1"):
            faulthandler.unregister(signal.SIGUSR1)


def _end_with_parent() -> None:
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _watch(
    processes: dict[str, Any], folder: Path, timeout: float, progress: Callable[[str], None]
) -> dict[str, Any]:
    deadline = time.monotonic() + timeout
    results: dict[str, Any] = {}
    failures: list[tuple[float, str, str]] = []
    said = 0
    while len(results) + len(failures) < len(processes):
        time.sleep(0.05)
        said = _pass_on(folder, said, progress)
        for role, process in processes.items():
            if role in results or any(role == failed for _, failed, _ in failures):
                continue
            done = _code(process) is not None  # before the file is looked for
            found = folder / f"{role}.result"
            if found.exists():
                kind, value = pickle.loads(found.read_bytes())
                if kind == "result":
                    results[role] = value
                else:
                    failures.append((found.stat().st_mtime, role, f"failed:\n{value[2]}"))
            elif done:
                text = f"died (exit code {_code(process)}):\n{_log(folder, role)}"
                failures.append((time.time(), role, text))
        if failures and deadline > time.monotonic() + GRACE:
            deadline = time.monotonic() + GRACE
        if time.monotonic() > deadline:
            break
    _pass_on(folder, said, progress)
    if failures:
        _, role, text = min(failures)
        others = sorted(failed for _, failed, _ in failures if failed != role)
        after = f"\n(after it: {', '.join(others)})" if others else ""
        raise WorldError(f"{role} of {len(processes)} processes {text.rstrip()}{after}")
    late = [role for role in processes if role not in results]
    if late:
        stacks = _stacks(processes, late, folder)
        raise WorldError(
            f"{', '.join(late)} of {len(processes)} processes did not end in {timeout:g} seconds; "
            f"they were here:\n{stacks}"
        )
    return results


def _pass_on(folder: Path, said: int, progress: Callable[[str], None]) -> int:
    path = folder / "progress"
    lines = path.read_text().splitlines() if path.exists() else []
    for line in lines[said:]:
        progress(line)
    return len(lines)


def _stacks(processes: dict[str, Any], roles: Sequence[str], folder: Path) -> str:
    for role in roles:
        if hasattr(signal, "SIGUSR1") and _code(processes[role]) is None:
            os.kill(processes[role].pid, signal.SIGUSR1)
    time.sleep(0.5)  # faulthandler writes from the signal handler; nothing tells us when
    return "\n".join(
        f"--- {role}\n{path.read_text() if (path := folder / f'{role}.stack').exists() else ''}"
        for role in roles
    )


def _log(folder: Path, role: str) -> str:
    path = folder / f"{role}.log"
    return path.read_text(errors="replace")[-4000:] if path.exists() else ""


def _code(process: Any) -> int | None:
    """The exit code of a subprocess or of a forked one, None while it runs."""
    return process.poll() if isinstance(process, subprocess.Popen) else process.exitcode


def _join(process: Any) -> None:
    process.wait() if isinstance(process, subprocess.Popen) else process.join()


if __name__ == "__main__":
    serve(sys.argv[2], Path(sys.argv[1]))
