"""The ranks' agreement through one store: requests, bytes and seconds of the store's processor.

    python benchmarks/agreement.py [--ranks 8 64 512] [--naive 8 64 512] [--late 5] [--json PATH]

Ranks are threads of this process, each with connections of its own to one TCPStore in another
process, whose processor time is read from it. `naive` is the exchange in which every rank sets two
keys, one with all members, and asks for those of all others; `vote` has no hosts, `hosts` has
eight ranks each, whose own stores are in this process' memory and counted apart. Growth is the
power of the number of ranks that fits.

A start is all that a rank asks until its third step on dp_shard x tp=8 (START), with the patience
of a world of 16,384 ranks: nobody late, or the last of each group so many seconds. Their cost is
said twice: requests times what one of the kind costs here, and the store's seconds times ranks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from autoshard.runtime.agreement import store_exchange, whereabouts
from autoshard.runtime.agreement.store_exchange import Host, StoreExchange

MANY = 16384
HERE = 8  # ranks of a host
NOBODY = 1000.0  # patience with which nobody is late, whatever this machine's load
PATIENCE = timedelta(minutes=10)
QUESTIONS = {"get": 2, "multi_get": 2}  # torch asks first whether the key is there
# exchanges of a rank until its third step on dp_shard x tp, where tp are the ranks of a host: over
# which ranks, and whether one of them may be late, as it has traced or compiled before
START = (
    *(("world", False), ("tp", True), ("dp", True), ("world", False), ("world", False)),
    *(("world", False), ("tp", True), ("tp", True), ("tp", False), ("tp", False)),
)


class Counted:
    """A connection to the store, and the second one of its rank, that count requests and bytes."""

    def __init__(self, store: Any) -> None:
        self.store, self.requests = store, Counter[str]()
        self.second: Counted | None = None

    def clone(self) -> Counted:
        if self.second is None:
            self.second = Counted(self.store.clone())
        return self.second

    def counted(self) -> Counter[str]:
        """What both have asked, since it was last asked."""
        found, self.requests = self.requests, Counter[str]()
        return found if self.second is None else found + self.second.counted()

    def has_extended_api(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            result = getattr(self.store, name)(*args)
            self.requests[name] += QUESTIONS.get(name, 1)
            self.requests["bytes"] += sum(map(_bytes, (*args, result)))
            if args and isinstance(args[0], list):
                self.requests["keys"] += len(args[0]) - 1  # beyond the first
            return result

        return call


def _bytes(value: Any) -> int:
    if isinstance(value, (str, bytes)):
        return len(value)
    return sum(map(_bytes, value)) if isinstance(value, list) else 0


class Rank:
    """What `StoreExchange` asks of a process group."""

    def __init__(self, rank: int, size: int, store: Counted) -> None:
        self.rank, self.size = (lambda: rank), (lambda: size)
        self.store = store

    def get_group_store(self) -> Counted:
        return self.store


def serve(pipe: Any) -> None:
    """The store's process: answers with its processor seconds, and the number of its keys."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, PATIENCE, wait_for_workers=False)
    pipe.send(store.port)
    while pipe.recv():
        pipe.send((time.process_time(), store.num_keys()))


class Store:
    """A TCPStore in a process of its own."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other,), daemon=True)
        self._process.start()
        self.port = self._pipe.recv()
        self._ranks: list[Counted] = []

    def ranks(self, n: int) -> list[Counted]:
        """The connections of n ranks. Each asks for the name of a host, which may take seconds."""
        more = n - len(self._ranks)
        if more > 0:
            with ThreadPoolExecutor(more) as pool:
                made = [*pool.map(lambda _: Counted(self.connection()), range(more))]
                self._ranks += made
                [*pool.map(Counted.clone, made)]
        return self._ranks[:n]

    def connection(self) -> Any:
        store = dist.TCPStore("127.0.0.1", self.port, None, False, PATIENCE)
        return dist.PrefixStore("default_pg", store)

    def state(self) -> tuple[float, int]:
        self._pipe.send(True)
        seconds, keys = self._pipe.recv()
        return seconds, keys

    def close(self) -> None:
        self._pipe.send(False)
        self._process.join()


def naive(exchange: StoreExchange, turn: int, members: Sequence[int]) -> None:
    """Every rank sets two keys, asks for those of all others, and reads them."""
    store, rank = exchange.world.store, exchange.rank
    slots = {m: f"autoshard/naive/0123456789ab/{turn}/{m}" for m in members}
    place = {"state": "waits", "name": "0123456789ab", "count": turn, "members": list(members)}
    store.set(slots[rank], json.dumps({"what": "plan", "here": "plan", "digest": 64 * "a"}))
    store.set(f"autoshard/naive/at/{rank}", json.dumps({**place, "what": "plan"}))
    others = [slot for member, slot in slots.items() if member != rank]
    pause = 0.0005
    while not store.check(others):
        time.sleep(pause)
        pause = min(1.5 * pause, 0.05)
    store.multi_get(others)
    if turn > 1:
        store.delete_key(f"autoshard/naive/0123456789ab/{turn - 1}/{rank}")


def vote(exchange: StoreExchange, turn: int, members: Sequence[int]) -> None:
    """What `agree` does where ranks do not differ."""
    exchange.exchange("a", "plan", members, vote=64 * "a")


def values(exchange: StoreExchange, turn: int, members: Sequence[int]) -> None:
    """What `from_first` does."""
    exchange.exchange(exchange.rank, "plan", members, combine=lambda given: given[0])


WAYS = {"naive": naive, "vote": vote, "hosts": vote, "values": values}


def exchanges(stores: Sequence[Counted], hosts: bool) -> list[StoreExchange]:
    """Those of a new world; hosts: whether its ranks are of hosts, which they know."""
    n, world = len(stores), str(time.monotonic_ns())
    ranks = [StoreExchange(Rank(i, n, own), world) for i, own in enumerate(stores)]
    memory = [dist.HashStore() for _ in range(0, n, HERE)]
    for rank in ranks if hosts and n > HERE else ():
        first = rank.rank // HERE * HERE
        rank.host = Host(range(first, first + HERE), memory[rank.rank // HERE])
    return ranks


def asked(stores: Sequence[Counted]) -> Counter[str]:
    """What all ranks have asked, since that was last asked."""
    return sum((own.counted() for own in stores), Counter[str]())


def run(
    ranks: Sequence[StoreExchange], work: Callable[[StoreExchange, Callable[[], Any]], None]
) -> tuple[list[threading.Thread], threading.Barrier]:
    """Threads that have done `work` until its call of the second argument, once all have."""
    start = threading.Barrier(len(ranks) + 1)

    def both() -> None:
        start.wait()
        start.wait()

    threads = [threading.Thread(target=work, args=(rank, both)) for rank in ranks]
    for thread in threads:
        thread.start()
    start.wait()
    return threads, start


def measured(store: Store, way: str, n: int, turns: int, late: float = 0.0) -> dict[str, Any]:
    """Requests, bytes and processor seconds of one exchange of n ranks; those of a second in which
    one of them is late, where `late` says how long."""
    stores, members = store.ranks(n), range(n)

    def work(exchange: StoreExchange, begin: Callable[[], Any]) -> None:
        WAYS[way](exchange, 1, members)
        begin()
        if late and exchange.rank == n - 1:
            time.sleep(late)
        for turn in range(turns):
            WAYS[way](exchange, turn + 2, members)

    threads, start = run(exchanges(stores, way == "hosts"), work)
    asked(stores)
    before, keys = store.state()
    start.wait()
    waiting = Counter[str]()
    if late:  # the ranks have come and told where they are: a second of nothing but waiting
        time.sleep(late - 1.5)
        asked(stores)
        time.sleep(1.0)
        waiting = asked(stores)
    for thread in threads:
        thread.join()
    seconds, left = store.state()
    requests = asked(stores)
    return {
        "way": way,
        "ranks": n,
        "requests": _requests(requests) / turns,
        "bytes": requests["bytes"] / turns,
        "seconds": (seconds - before) / turns,
        "keys_left": (left - keys) / turns,
        **({"late": late, "requests_a_second": _requests(waiting)} if late else {}),
    }


def started(store: Store, n: int, hosts: bool, late: float) -> dict[str, Any]:
    """What n ranks ask until their third step, with the patience of those of 16,384."""
    stores = store.ranks(n)

    def groups(rank: int) -> dict[str, Sequence[int]]:
        first = rank // HERE * HERE
        return {
            "world": range(n),
            "tp": range(first, first + HERE),
            "dp": range(rank % HERE, n, HERE),
        }

    def work(exchange: StoreExchange, begin: Callable[[], Any]) -> None:
        begin()
        exchange.begun()
        own = groups(exchange.rank)
        for kind, may_be_late in START:
            if late and may_be_late and exchange.rank == own[kind][-1]:
                time.sleep(late)
            if len(own[kind]) > 1:
                vote(exchange, 0, own[kind])

    quiet, look = whereabouts._QUIET, whereabouts.LOOK
    whereabouts._QUIET = max(1, quiet * n // MANY)
    whereabouts.LOOK = look if late else NOBODY
    threads, start = run(exchanges(stores, hosts), work)
    asked(stores)
    before = store.state()[0]
    start.wait()
    for thread in threads:
        thread.join()
    whereabouts._QUIET, whereabouts.LOOK = quiet, look
    seconds, requests = store.state()[0] - before, asked(stores)
    return {"ranks": n, "hosts": hosts, "late": late, "seconds": seconds, "asked": dict(requests)}


def _requests(counted: Counter[str]) -> int:
    return counted.total() - counted["bytes"] - counted["keys"]


def single(store: Store, clients: int = 32, times: int = 300) -> dict[str, float]:
    """Processor seconds of one request of each kind, with many connections."""
    connections = [own.store for own in store.ranks(clients)]
    ways: dict[str, Callable[[Any, int], Any]] = {
        "add": lambda s, i: s.add("single/count", 1),
        "set": lambda s, i: s.set(f"single/{i}", 150 * "a"),
        "check": lambda s, i: s.check([f"single/{i}"]),
        "wait": lambda s, i: s.wait([f"single/{i}"], PATIENCE),
        "get": lambda s, i: s.get(f"single/{i}"),
        "multi_get": lambda s, i: s.multi_get([f"single/{i}"]),
        "delete_key": lambda s, i: s.delete_key(f"single/{i}"),
        "keys": lambda s, i: s.check([f"single/{k}" for k in range(i, i + 257)]),
    }
    found = {}
    for name, way in ways.items():

        def work(number: int, way: Any = way) -> None:
            for i in range(times):
                way(connections[number], number * times + i)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(clients)]
        before = store.state()[0]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found[name] = (store.state()[0] - before) / clients / times
    apart = found["keys"] - found["check"]
    found["keys"] = apart / 256 if apart > 0 else 0.0
    # each of the two questions of a read
    return {kind: cost / QUESTIONS.get(kind, 1) for kind, cost in found.items()}


def power(rows: list[dict[str, Any]], column: str) -> float:
    """The power of the number of ranks with which a column grows, by least squares."""
    points = [(math.log(row["ranks"]), math.log(max(row[column], 1e-9))) for row in rows]
    x, y = (sum(axis) / len(points) for axis in zip(*points, strict=True))
    spread = sum((a - x) ** 2 for a, _ in points)
    return sum((a - x) * (b - y) for a, b in points) / spread if spread else math.nan


def main() -> None:
    """Print a line for each way and number of ranks, growth, and what many ranks would cost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--naive", type=int, nargs="*", default=[8, 64, 256])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--late", type=float, default=5.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    threading.stack_size(256 * 1024)
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # torch asks for names of hosts
    store_exchange._PAUSE = 1.0  # thousands of threads share few cores
    store = Store()
    look = whereabouts.LOOK
    whereabouts.LOOK = NOBODY
    rows: list[dict[str, Any]] = []
    print("way     ranks   requests a rank   bytes a rank   store ms   us a rank   keys left")
    for way in WAYS:
        for n in args.naive if way == "naive" else args.ranks:
            row = measured(store, way, n, args.turns)
            rows.append(row)
            print(
                f"{way:6}{n:7}{row['requests'] / n:18.2f}{row['bytes'] / n:15.0f}"
                f"{1e3 * row['seconds']:11.1f}{1e6 * row['seconds'] / n:12.1f}"
                f"{row['keys_left']:12.1f}",
                flush=True,
            )
    growth = {
        way: {c: power(own, c) for c in ("requests", "bytes", "seconds")}
        for way in WAYS
        if len(own := [row for row in rows if row["way"] == way]) > 1
    }
    for way, powers in growth.items():
        said = ", ".join(f"{column} n^{p:.2f}" for column, p in powers.items())
        print(f"{way} grows in all as: {said}")
    one = {(row["way"], row["ranks"]): max(row["seconds"], 1e-6) for row in rows}
    for n in args.ranks:
        for way in ("naive", "hosts"):
            if (way, n) in one:
                ratio = one[way, n] / one["vote", n]
                print(f"{n} ranks: {way} / vote = {ratio:.2f} of the store's processor")
    whereabouts.LOOK = look
    late: list[dict[str, Any]] = []
    for n in args.ranks if args.late else ():
        for way in ("vote", "hosts"):
            late.append(measured(store, way, n, 1, args.late))
            each = late[-1]["requests_a_second"] / n
            print(f"{n} ranks, one {args.late:g} s late, {way}: {each:.2f} requests a second, rank")
    cost = single(store)
    print("one request, us: " + ", ".join(f"{k} {1e6 * v:.2f}" for k, v in cost.items()))
    starts: list[dict[str, Any]] = []
    many = [n for n in args.ranks if n > HERE]
    for n in many:
        some = (1.0, args.late) if n == many[0] else ()  # many threads are late by themselves
        for late_by, hosts in itertools.product((0.0, *some), (False, True)):
            row = started(store, n, hosts, late_by)
            starts.append(row)
            of = Counter(row["asked"])
            row["computed"] = MANY / n * sum(cost[kind] * of[kind] for kind in cost)
            print(
                f"{n} ranks, start, {'hosts' if hosts else 'vote'}, {late_by:g} s late: "
                f"{_requests(of) / n:.1f} requests a rank; {MANY} ranks: {row['computed']:.2f} s "
                f"by requests, {MANY / n * row['seconds']:.2f} s by this measurement",
                flush=True,
            )
    step = MANY * (cost["add"] + cost["wait"])
    print(f"{MANY} ranks, a checked step: {step:.2f} s by a vote; no request by a reduction: 0 s")
    store.close()
    if args.json is not None:
        result = {"rows": rows, "growth": growth, "late": late, "request": cost, "starts": starts}
        args.json.write_text(json.dumps({**result, "voted_step": step}, indent=2))


if __name__ == "__main__":
    main()
