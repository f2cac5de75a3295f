"""The ranks' agreement through one store: requests, bytes and seconds of the store's processor.

    python benchmarks/agreement.py [--ranks 8 64 512] [--naive 8 64 512] [--late 5] [--json PATH]

Ranks are threads of this process, each with connections of its own to one TCPStore in another
process, whose processor time is read from it. Beside the vote stands the exchange in which every
rank sets two keys, one with all members, and asks for those of all others. Growth is the power of
the number of ranks that fits. What 16,384 ranks would cost is the number of requests times what
one of its kind costs here.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from autoshard.runtime.agreement import store_exchange
from autoshard.runtime.agreement.store_exchange import StoreExchange

MANY = 16384
PATIENCE = timedelta(minutes=10)
QUESTIONS = {"get": 2, "multi_get": 2}  # torch asks first whether the key is there
START = {"vote": 10, "late vote": 3}  # exchanges of a rank until its third step, dp_shard x tp
CHECKED = {"vote": 1}  # in a step under same_inputs.batches="always"


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


WAYS = {"naive": naive, "vote": vote, "values": values}


def measured(store: Store, way: str, n: int, turns: int, late: float = 0.0) -> dict[str, Any]:
    """Requests, bytes and processor seconds of one exchange of n ranks; those of a second in which
    one of them is late, where `late` says how long."""
    stores, world = store.ranks(n), str(time.monotonic_ns())
    ranks = [StoreExchange(Rank(i, n, own), world) for i, own in enumerate(stores)]
    members = range(n)
    start = threading.Barrier(n + 1)

    def asked() -> Counter[str]:
        return sum((own.counted() for own in stores), Counter[str]())

    def work(exchange: StoreExchange) -> None:
        WAYS[way](exchange, 1, members)
        start.wait()
        start.wait()
        if late and exchange.rank == n - 1:
            time.sleep(late)
        for turn in range(turns):
            WAYS[way](exchange, turn + 2, members)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    start.wait()
    asked()
    before, keys = store.state()
    start.wait()
    if late:  # the ranks have come and told where they are: a second of nothing but waiting
        time.sleep(late - 1.5)
        asked()
        time.sleep(1.0)
        waiting = asked()
    for thread in threads:
        thread.join()
    seconds, left = store.state()
    requests = asked()
    octets = requests["bytes"]
    return {
        "way": way,
        "ranks": n,
        "requests": _requests(requests) / turns,
        "bytes": octets / turns,
        "seconds": (seconds - before) / turns,
        "keys_left": (left - keys) / turns,
        **({"late": late, "requests_a_second": _requests(waiting)} if late else {}),
    }


def _requests(counted: Counter[str]) -> int:
    return counted.total() - counted["bytes"]


def single(store: Store, clients: int = 32, times: int = 300) -> dict[str, float]:
    """Processor seconds of one request of each kind, with many connections."""
    connections = [own.store for own in store.ranks(clients)]
    ways: dict[str, Callable[[Any, int], Any]] = {
        "add": lambda s, i: s.add("single/count", 1),
        "set": lambda s, i: s.set(f"single/{i}", 150 * "a"),
        "check": lambda s, i: s.check([f"single/{i}"]),
        "wait": lambda s, i: s.wait([f"single/{i}"], PATIENCE),
        "get": lambda s, i: s.get(f"single/{i}"),
        "delete_key": lambda s, i: s.delete_key(f"single/{i}"),
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
    return found


def predicted(cost: dict[str, float]) -> dict[str, float]:
    """Processor seconds of the store for one exchange of 16,384 ranks."""
    voted = MANY * (cost["add"] + cost["wait"])
    # each tells where it is and takes it back, asks twice for a failure, and reads the end
    told = MANY * (cost["add"] + 2 * cost["set"] + 2 * cost["check"] + cost["get"])
    return {"vote": voted, "late vote": voted + told, "values": voted + told - MANY * cost["add"]}


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
    store = Store()
    look = store_exchange.LOOK
    store_exchange.LOOK = 1000.0  # nobody is late, whatever this machine's load
    rows: list[dict[str, Any]] = []
    print(
        "way     ranks   requests a rank   bytes a rank   store ms in all   us a rank   keys left"
    )
    for way, sizes in (("naive", args.naive), ("vote", args.ranks), ("values", args.ranks)):
        for n in sizes:
            row = measured(store, way, n, args.turns)
            rows.append(row)
            print(
                f"{way:6}{n:7}{row['requests'] / n:18.1f}{row['bytes'] / n:15.0f}"
                f"{1e3 * row['seconds']:18.1f}{1e6 * row['seconds'] / n:12.1f}"
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
    for n in args.ranks:
        one = {w: next((r for r in rows if r["way"] == w and r["ranks"] == n), None) for w in WAYS}
        if one["naive"] and one["vote"]:
            ratio = one["naive"]["seconds"] / max(one["vote"]["seconds"], 1e-6)
            print(f"{n} ranks: naive / vote = {ratio:.1f} of the store's processor")
    store_exchange.LOOK = look
    late = []
    for n in args.ranks if args.late else ():
        late.append(measured(store, "vote", n, 1, args.late))
        each = late[-1]["requests_a_second"] / n
        print(f"{n} ranks, one {args.late:g} s late: {each:.2f} requests a second and rank")
    cost = single(store)
    print("one request, us: " + ", ".join(f"{k} {1e6 * v:.1f}" for k, v in cost.items()))
    many = predicted(cost)
    start = sum(number * many[kind] for kind, number in START.items())
    step = sum(number * many[kind] for kind, number in CHECKED.items())
    print(f"{MANY} ranks, computed: " + ", ".join(f"{k} {v:.2f} s" for k, v in many.items()))
    print(f"{MANY} ranks, computed: start {start:.2f} s, a checked step {step:.2f} s")
    store.close()
    if args.json is not None:
        result = {"rows": rows, "growth": growth, "late": late, "request": cost, "many": many}
        args.json.write_text(json.dumps({**result, "start": start, "step": step}, indent=2))


if __name__ == "__main__":
    main()
