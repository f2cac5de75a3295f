"""Processes that hand weights on until one of them is killed: what the others hold then.

    python killed_updates.py KILLS SEED [store]

forks, for each kill, two processes that send and two that receive, of worlds of their own, that
meet at an address. All tensors of version n are full of n. At a drawn moment a drawn process is
killed. Prints a line of JSON for each kill: the versions in the tensors of each process that is
left, and what it raised. store: the process that is killed is the one that holds the store.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from autoshard.weights import WeightLink
from autoshard.weights.parts import HeldPart, Sender, Tensors
from autoshard.weights.update import Update

SIZE, COUNT = 48, 30


def parts(rank: int, version: float) -> dict[str, HeldPart]:
    """Rows on the ranks that send, columns on those that receive."""
    half = (rank % 2 * SIZE // 2, rank % 2 * SIZE // 2 + SIZE // 2)
    box = (half, (0, SIZE)) if rank < 2 else ((0, SIZE), half)
    shape = tuple(high - low for low, high in box)
    made = {}
    for i in range(COUNT):
        own = torch.full(shape, version)
        made[f"w{i}"] = HeldPart(own, (SIZE, SIZE), box, own)
    return made


def serve(rank: int, port: int, begun: int) -> dict[str, Any]:
    """Updates until one fails; the versions then, and the error. begun: told of the first."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    held, version, error = parts(rank, 0.0), 0, ""
    try:
        link = WeightLink(store, rank, 4, timeout=60)
        while True:
            if rank < 2:
                held = parts(rank, version + 1.0)
                Update(link, Sender(held), None, version + 1, 2048, False).wait()
            else:
                names = {name: name for name in held}
                report = Update(link, None, Tensors(held, names), None, 2048, False).wait()
                assert report.version == version + 1
            version += 1
            if version == 1:
                os.write(begun, b"!")
    except Exception as raised:
        error = str(raised)
    values = {float(x) for part in held.values() for x in part.tensor.unique()}
    return {"rank": rank, "versions": sorted(values), "done": version, "error": error}


def hold_store(told: int) -> None:
    """The store of a job, as a launcher holds it, until this process is killed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(told, str(store.port).encode())
    signal.pause()


def started(run: Callable[[int], Any]) -> tuple[int, int]:
    """A forked process, and the end of the pipe in which it writes, then what `run` returns. This
    one has no threads: a fork would have their locks and not them."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reading)
        os.write(writing, json.dumps(run(writing)).encode())
        os._exit(0)
    os.close(writing)
    return pid, reading


def kill_one(draw: random.Random, number: int, store: bool) -> dict[str, Any]:
    """One job: which process was killed, and what the others say."""
    host, told = started(hold_store)
    port = int(os.read(told, 16))
    made = [started(lambda begun, r=rank: serve(r, port, begun)) for rank in range(4)]
    children, pipes = zip(*made, strict=True)
    # one that sends and one that receives in turn
    killed = 4 if store else (draw.randrange(2) + 2 * number) % 4
    for reading in pipes:
        assert os.read(reading, 1) == b"!"
    time.sleep(0.7 * draw.random())
    os.kill([*children, host][killed], signal.SIGKILL)
    said = []
    for rank, (pid, pipe) in enumerate(zip(children, pipes, strict=True)):
        with os.fdopen(pipe) as stream:
            text = stream.read()
        os.waitpid(pid, 0)
        if rank != killed:
            said.append(json.loads(text))
    if not store:
        os.kill(host, signal.SIGKILL)
    os.waitpid(host, 0)
    os.close(told)
    return {"killed": killed, "said": said}


def main() -> None:
    draw = random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    for number in range(int(sys.argv[1])):
        one = kill_one(draw, number, "store" in sys.argv)
        print(json.dumps(one), flush=True)


if __name__ == "__main__":
    main()
