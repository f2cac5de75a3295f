"""A graph that ranks of several hosts compile alike is compiled by one of them, for all.

Ranks that share the folder of Inductor's cache find each other's work there
(`compat.inductor_artifacts.first_compiles`). Where a job has several folders, the first rank of
each asks the store: the first of all compiles, and puts the bytes into the store in pieces; the
others wait for them, and load. Nothing waits for a rank that compiles and gives no sign of life:
who has waited in vain, or has got what it cannot read, compiles by itself, and `explain` says so.

Or a process compiles it before the job, for all ranks (`autoshard compile`), into a folder that a
job is given in the place of its plan: `AHEAD`.
"""

import contextlib
import hashlib
import json
import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from autoshard.runtime import compat
from autoshard.runtime.agreement.store_exchange import StoreExchange
from autoshard.runtime.agreement.threads import Background, StoreLost, within
from autoshard.runtime.agreement.worlds import current_exchange
from autoshard.runtime.errors import ConfigError
from autoshard.runtime.files import own_bytes, read_json

PIECE = 1 << 20  # bytes of one value in the store
MOST = 256 << 20  # bytes of a graph that are put there at all
BEAT, SILENCE = 1.0, 20.0  # seconds between signs of life, and after which there is none
_PATIENCE = 600.0  # seconds: as long as Inductor waits for its own locks
_ANSWER = 30.0  # seconds in which the store answers


class Compiles:
    """What this rank has compiled for other hosts of its world, and loaded from them.

    lines: of each graph that went another way than one compilation for all.
    """

    def __init__(self, exchange: StoreExchange) -> None:
        self.made = self.loaded = self.bytes = 0
        self.lines: list[str] = []
        self._rank = exchange.rank
        self._store: Any = exchange.world.get_group_store()
        self._folders = f"{exchange.prefix}/folders"
        self._graphs = f"{exchange.prefix}/compiled/{compat.kind_of_host()}"
        self._folder = compat.cache_folder()
        if self._ask("add", f"{self._folders}/{self._folder}", 1) == 1:
            self._ask("add", self._folders, 1)

    @contextlib.contextmanager
    def once(self, key: str) -> Iterator[None]:
        """The compilation of a graph, or the loading of what another host has compiled before it.

        key: of the graph. Meant to be entered by one process of a folder at a time.
        """
        key = f"{self._graphs}/{key}"
        kernels: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        first = False
        try:
            if self._ask("add", self._folders, 0) > 1:
                known = self._ask("add", f"{key}/{self._folder}", 1) > 1
                first = not known and self._ask("add", f"{key}/folders", 1) == 1
                if known or (not first and self._load(key)):
                    kernels = compat.without_headers()
        except (StoreLost, dist.DistError) as error:
            self._alone(f"the store {error}")
        if not first:
            with kernels:
                yield
            return
        told: dict[str, Any] = {"why": "its compilation failed"}
        try:
            with self._beating(key), compat.recorded() as bytes_of:
                yield
            told = self._published(key, bytes_of())
            self.made += 1
        finally:
            with contextlib.suppress(StoreLost, dist.DistError):
                self._ask("set", f"{key}/end", json.dumps({"rank": self._rank, **told}))

    def _alone(self, why: str) -> None:
        self.lines.append(f"compiled by rank {self._rank} though others compile the same: {why}")

    def _published(self, key: str, data: bytes) -> dict[str, Any]:
        """Put pieces into the store; what is told of them."""
        if not 0 < len(data) <= MOST:
            return {"why": f"there were {len(data)} bytes to load, of {MOST} at most"}
        pieces = range(0, len(data), PIECE)
        try:
            for number, start in enumerate(pieces):
                self._ask("set", f"{key}/{number}", data[start : start + PIECE])
        except (StoreLost, dist.DistError) as error:
            return {"why": f"the store {error}"}
        return {"pieces": len(pieces), "hash": hashlib.sha256(data).hexdigest()}

    def _load(self, key: str) -> bool:
        """Whether what the first host has compiled is loaded."""
        told = self._awaited(key)
        why = told.get("why")
        if why is None:
            parts = [f"{key}/{number}" for number in range(told["pieces"])]
            there = self._ask("check", parts)
            data = b"".join(self._ask("get", part) for part in parts) if there else b""
            if hashlib.sha256(data).hexdigest() != told["hash"]:
                why = "its bytes are not those that it made"
            else:
                try:
                    compat.load_recorded(data)
                except Exception as error:
                    why = f"its bytes were not loaded ({type(error).__name__}: {error})"
            if self._ask("add", f"{key}/read", 1) == self._ask("add", self._folders, 0) - 1:
                for part in parts:  # this was the last that may want them
                    self._ask("delete_key", part)
        if why is None:
            self.loaded, self.bytes = self.loaded + 1, self.bytes + len(data)
            return True
        self._alone(f"{why} (rank {told['rank']} was first)" if "rank" in told else why)
        return False

    def _awaited(self, key: str) -> dict[str, Any]:
        """What the first host has told of a graph; why nothing can be loaded, where that is so."""
        beat, pause = -1, 0.05
        began = heard = time.monotonic()
        while not self._ask("check", [f"{key}/end"]):
            now = time.monotonic()
            found = self._ask("add", f"{key}/beat", 0)
            if found != beat:
                beat, heard = found, now
            if now - heard > SILENCE or now - began > _PATIENCE:
                return {"why": f"no sign of life for {now - heard:.0f} of {now - began:.0f} s"}
            time.sleep(pause)
            pause = min(1.5 * pause, BEAT)
        told: dict[str, Any] = json.loads(self._ask("get", f"{key}/end"))
        return told

    @contextlib.contextmanager
    def _beating(self, key: str) -> Iterator[None]:
        """Signs of life meanwhile."""

        def beat(over: threading.Event) -> None:
            with contextlib.suppress(StoreLost, dist.DistError):
                while not over.wait(BEAT):
                    self._ask("add", f"{key}/beat", 1)

        thread = Background("compiles", beat)
        try:
            yield
        finally:
            thread.over.set()
            thread.join(_ANSWER)

    def _ask(self, request: str, *given: Any) -> Any:
        return within(_ANSWER, lambda: getattr(self._store, request)(*given))


_known: weakref.WeakKeyDictionary[StoreExchange, Compiles] = weakref.WeakKeyDictionary()


def compiles() -> Compiles | None:
    """Those of the running world; None where nobody else is in it, or hosts share nothing.

    Asked for before ranks agree on a program: those that then compile it know of each other's
    folders.
    """
    exchange = current_exchange()
    if exchange is None or not compat.may_be_handed_on():
        return None
    if exchange not in _known:
        try:
            _known[exchange] = Compiles(exchange)
        except (StoreLost, dist.DistError):  # who agrees next says so
            return None
    return _known[exchange]


def compiled_across_hosts() -> str:
    """What `explain` says of it; "" where hosts have shared nothing."""
    own = _known.get(exchange) if (exchange := current_exchange()) is not None else None
    if own is None or not (own.made or own.loaded or own.lines):
        return ""
    got = f"{own.loaded} loaded from other hosts ({own.bytes:,} bytes)"
    return "\n".join([f"graphs compiled here for every host: {own.made}; {got}", *own.lines])


MadeFor = Mapping[str, list[str]]
"""What was compiled for, as lines by kind."""

_KINDS = ("model", "options", "versions", "device")


class Ahead:
    """What a process compiles for the ranks of a later job, and what a rank of that job loads.

    graphs: the keys of either. facts: while it is `making`, what of.
    """

    def __init__(self) -> None:
        self.graphs: set[str] = set()
        self.facts: dict[str, list[str]] | None = None
        self._folder: Path | None = None

    @contextlib.contextmanager
    def making(self, folder: Path) -> Iterator[None]:
        """Compile from an empty cache, and write all of it to the folder at the end."""
        self.graphs, self.facts = set(), {}
        try:
            with compat.empty_cache(), compat.recorded() as bytes_of:
                yield
            data = bytes_of()
            told = {"graphs": sorted(self.graphs), "hash": hashlib.sha256(data).hexdigest()}
            (folder / "artifacts").write_bytes(data)
            (folder / "made.json").write_text(json.dumps({**self.facts, **told}, indent=1))
            for path in (folder / "artifacts", folder / "made.json"):
                path.chmod(0o644)
        finally:
            self.graphs, self.facts = set(), None

    def load(self, folder: Path, facts: MadeFor) -> set[str]:
        """The kinds of facts in which a job differs from what the folder was made for; where it
        does not, its graphs are loaded."""
        body = read_json(folder / "made.json", "list of what was made ahead", ConfigError)
        body.only((*_KINDS, "graphs", "hash"))
        made = {kind: [line.text() for line in body.entry(kind).items()] for kind in _KINDS}
        other = {kind: sorted(set(facts[kind]) - set(made[kind])) for kind in _KINDS}
        differing = {kind for kind in _KINDS if other[kind]}
        if differing:
            shown = "; ".join(f"{kind}: {other[kind][0]:.200}" for kind in sorted(differing))
            said = f"{folder} was made for another job, and this one compiles: {shown}"
            warnings.warn(said, stacklevel=1)
        elif self._folder != folder:
            data = own_bytes(folder / "artifacts", "compiled graphs", ConfigError)
            if hashlib.sha256(data).hexdigest() != body.entry("hash").text():
                raise ConfigError(
                    f"{folder / 'artifacts'}: its {len(data):,} bytes are not those that were made",
                    remedy="Copy the folder again, or make it again: autoshard compile.",
                )
            try:
                compat.load_recorded(data)
            except Exception as error:
                raise ConfigError(f"{folder / 'artifacts'} cannot be loaded: {error}") from error
            self.graphs = {key.text() for key in body.entry("graphs").items()}
            self._folder = folder
        return differing

    def kernels(self) -> contextlib.AbstractContextManager[None]:
        """Around what finds kernels: where they were loaded, no header is compiled for them."""
        loaded = self._folder is not None
        return compat.without_headers() if loaded else contextlib.nullcontext()

    @contextlib.contextmanager
    def once(self, shared: Compiles | None, key: str) -> Iterator[None]:
        """The compilation of a graph. shared: with whom, if it was not made ahead."""
        known = key in self.graphs
        if self.facts is not None:
            self.graphs.add(key)
        elif self._folder is not None and not known:
            said = f"a graph of this model or batch is not in {self._folder}, and is compiled"
            warnings.warn(said, stacklevel=1)
        with (
            self.kernels(),
            contextlib.nullcontext() if shared is None or known else shared.once(key),
        ):
            yield


AHEAD = Ahead()
