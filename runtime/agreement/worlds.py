"""The exchange of the world that runs now: made with it, and told when this process ends."""

import atexit
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from autoshard.runtime import compat
from autoshard.runtime.agreement.store_exchange import Host, StoreExchange
from autoshard.runtime.agreement.whereabouts import DEFAULT_LIMIT, SPARE
from autoshard.runtime.errors import AutoshardError


class _Worlds(NamedTuple):
    """The exchange of the present world, how many worlds there have been, and the seconds that
    its collectives wait by themselves."""

    exchange: StoreExchange | None
    generation: int
    limit: float


_current = _Worlds(None, 0, DEFAULT_LIMIT)


def current_exchange() -> StoreExchange | None:
    """The exchange of the running world; None where there is none, or nobody else in it.

    Ranks count the worlds they have been in, so that a store which outlives one holds no old
    message for the next. Raises AutoshardError in a process that a rank has forked: it is no rank.
    """
    exchange = _current.exchange
    if exchange is not None and exchange.world is dist.group.WORLD:
        return exchange
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return None
    if dist.group.WORLD is _inherited:
        raise AutoshardError(
            f"process {os.getpid()} was forked by rank {dist.get_rank()} and is no rank itself",
            remedy="Call sharded models, and read their parameters, in the ranks only; a "
            "worker of a DataLoader gets what it needs as tensors.",
        )
    renew()
    return _current.exchange


def renew() -> None:
    """Begin a new world, with no failure and its own time limits."""
    global _current
    if _current.exchange is None:
        atexit.register(_leave)
    world = dist.group.WORLD
    assert world is not None
    before = _current.exchange
    if before is not None and before.world is world:  # what options have set is undone
        limit = _current.limit
        if compat.group_limit(world) not in (None, limit):
            compat.set_group_limit(world, limit)
    else:
        limit = compat.group_limit(world) or DEFAULT_LIMIT
    made = StoreExchange(world, f"{restarts()}/{_current.generation}")
    if before is None:
        _refuse_old_keys(made)
    made.tell_process()
    made.limit, made.host = limit, _host(world)
    if before is not None and before.world is world:
        made.take_over(before)
    _current = _Worlds(made, _current.generation + 1, limit)


def _host(world: Any) -> Host | None:
    """The ranks that one agent of torchrun has started, where there are more on other hosts. Their
    store is a file in the folder of this start, which the agent has made and deletes."""
    try:
        said = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        rank, size, here, ranks = (int(os.environ[name]) for name in said)
        folder = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[1]
    except (KeyError, IndexError):
        return None
    if (rank, size) != (world.rank(), world.size()) or not 1 < ranks < size or not folder.is_dir():
        return None
    store = dist.FileStore(str(folder / "autoshard"))  # type: ignore[call-arg]
    return Host(range(rank - here, rank - here + ranks), store)


def restarts() -> int:
    """How often torchrun has started the processes again, where all starts share one store.

    That is so of one node. Of several, each agent counts its own failures: the number is no name of
    a start, and `_refuse_old_keys` finds one that meets the keys of another.
    """
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not shared or int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1:
        return 0
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _refuse_old_keys(exchange: StoreExchange) -> None:
    """Raise AutoshardError where processes that have ended left their messages in the store."""
    if exchange.begun() > 1:
        raise AutoshardError(
            f"the store of the process group holds messages of rank {exchange.rank} of an "
            "earlier start of this job, which look like those of this one",
            remedy="Start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: each start then "
            "has a store of its own.",
        )


def wait_at_most(seconds: float | None) -> None:
    """Set the seconds that this rank waits for others before it raises an error; None: as long as
    its process group lets collectives wait."""
    exchange = current_exchange()
    if exchange is not None:
        exchange.limit = _current.limit if seconds is None else seconds


def compare_every(calls: int) -> None:
    """Set after how many calls of graphs the ranks compare those so far, in the long run."""
    exchange = current_exchange()
    if exchange is not None:
        exchange.every = calls


def limit_group(name: str) -> None:
    """Let collectives of a process group wait as long as comparisons do."""
    exchange = current_exchange()
    if exchange is not None:
        group = compat.process_group(name)
        if compat.group_limit(group) not in (None, exchange.limit):
            compat.set_group_limit(group, exchange.limit)


def _leave() -> None:
    exchange = _current.exchange
    if exchange is None or not dist.is_initialized():
        return
    story = _last_error()
    exchange.ended(f"has ended, after {story}" if story else "has ended")
    if exchange.rank == 0 and (story or exchange.failure is not None):
        time.sleep(SPARE)  # the others may have still to read of it, in the store that rank 0 holds


def _last_error() -> str:
    """The error that ends this process, with its line; "" where it ends well."""
    error = getattr(sys, "last_value", None)
    if not isinstance(error, Exception):
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error).rstrip('.')}{where}"


_inherited: Any = None  # the world of the process that forked this one


def _after_fork() -> None:
    """The child has the parent's connections, and its list of what to do at exit."""
    global _current, _inherited
    _inherited = dist.group.WORLD
    _current = _Worlds(None, _current.generation, DEFAULT_LIMIT)


os.register_at_fork(after_in_child=_after_fork)
