"""What Inductor has compiled, as bytes and for the processes beside: torch's cache artifacts,
libraries of CPU kernels, and the lock by which one process of a machine compiles a graph.

`torch.compiler.save_cache_artifacts` has graphs and GPU kernels. Kernels of a CPU are shared
libraries beside them in the folder of the cache, without which who loads a graph compiles them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock
from uuid import uuid4

import torch
from torch import fx
from torch.compiler._cache import CacheArtifact, CacheArtifactFactory, CacheArtifactManager

Once = Callable[[str], contextlib.AbstractContextManager[None]]
"""The compilation of a graph of that key, by one rank of a job."""


@CacheArtifactFactory.register
class _Library(CacheArtifact):
    """A CPU kernel as the compiler has left it."""

    def populate_cache(self) -> None:
        from torch._inductor.codecache import write_atomic

        path = _library(self.key)
        if not path.exists():
            write_atomic(str(path), self.content, make_dirs=True)

    @staticmethod
    def type() -> str:
        return "autoshard_library"


def _library(key: str) -> Path:
    from torch._inductor.codecache import get_path

    return Path(get_path(key, "main.so")[2])


class _Asked(dict[str, Any]):
    """A cache of loaded libraries that remembers which it was asked for."""

    def __init__(self, known: dict[str, Any], asked: set[str]) -> None:
        super().__init__(known)
        self._asked = asked

    def __getitem__(self, key: str) -> Any:
        self._asked.add(key)
        return super().__getitem__(key)


@contextlib.contextmanager
def recorded() -> Iterator[Callable[[], bytes]]:
    """The function that is entered returns, after the block, what Inductor has compiled or loaded
    in it, for `load_recorded`; nothing where nothing can be handed on."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache, CppWrapperCodeCache

    asked: set[str] = set()
    found = b""
    kinds: list[Any] = [CppPythonBindingsCodeCache, CppWrapperCodeCache]
    known = [kind.cache for kind in kinds]
    with CacheArtifactManager.with_fresh_cache():
        for kind, cache in zip(kinds, known, strict=True):
            kind.cache = _Asked(cache, asked)
        try:
            yield lambda: found
        finally:
            for kind, cache in zip(kinds, known, strict=True):
                cache.update(kind.cache)
                kind.cache = cache
        if CacheArtifactManager.need_serialize():
            for key in sorted(asked):
                if (path := _library(key)).exists():
                    CacheArtifactManager.record_artifact(_Library.type(), key, path.read_bytes())
        saved = CacheArtifactManager.serialize()
    if saved is not None:  # a user may save them too
        found = saved[0]
        for artifacts in (CacheArtifactManager.deserialize(found) or {}).values():
            for one in artifacts:
                CacheArtifactManager.record_artifact(one.type(), one.key, one.content)


def load_recorded(data: bytes) -> None:
    """Put what `recorded` returned on another host into the folder of this one's cache. It is code
    that is going to run. Raises ValueError where it cannot be read."""
    if torch.compiler.load_cache_artifacts(data) is None:
        raise ValueError("it is no artifact of this torch")


@contextlib.contextmanager
def empty_cache() -> Iterator[None]:
    """Inductor finds nothing that was compiled before; what it compiles meanwhile goes."""
    from torch._inductor.utils import fresh_cache

    with fresh_cache():
        yield


@contextlib.contextmanager
def without_headers() -> Iterator[None]:
    """No C++ header is compiled before a kernel is: kernels were loaded. One that was not, is
    compiled all the same."""
    from torch._inductor import codecache

    with mock.patch.object(codecache, "_precompile_header", lambda *_, **__: ""):
        yield


def may_be_handed_on() -> bool:
    """Whether what one host compiles is for others too: Inductor's own setting for remote caches
    says no where it is off (TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE=0)."""
    from torch._inductor import config

    return config.fx_graph_remote_cache is not False


def kind_of_host() -> str:
    """What kernels depend on beyond the graph: machine code is of one kind of processor."""
    known = Path("/proc/cpuinfo")
    lines = known.read_text().splitlines() if known.exists() else []
    facts = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    text = json.dumps([torch.__version__, platform.machine(), platform.processor(), *sorted(facts)])
    return hashlib.sha256(text.encode()).hexdigest()


def cache_folder() -> str:
    """A name for the folder of Inductor's cache, the same for all processes that share it."""
    from torch._inductor.codecache import cache_dir

    own = Path(cache_dir()) / "autoshard-folder"
    if not own.exists():
        own.parent.mkdir(parents=True, exist_ok=True)
        drawn = own.with_name(f"{own.name}-{uuid4().hex}")
        drawn.write_text(uuid4().hex)
        with contextlib.suppress(FileExistsError):  # another process was first
            own.hardlink_to(drawn)
        drawn.unlink()
    return own.read_text()


def _compiles_together(config: Any) -> bool:
    """Whether compiling is a collective: one of Inductor's settings under which ranks exchange
    estimates or timings meanwhile. One that waited for the other then would wait forever."""
    whole = getattr(config, "aten_distributed_optimizations", None)
    return bool(
        getattr(config, "distributed_max_autotune_gemm", False)
        or getattr(config, "reorder_for_compute_comm_overlap", False)
        or getattr(whole, "enable_overlap_scheduling", False)
        or getattr(whole, "spmd_check", False)
    )


@contextlib.contextmanager
def first_compiles(graph: fx.GraphModule, once: Once | None = None) -> Iterator[None]:
    """Of the processes that compile equal graphs at a time, the others wait for the first, and find
    what it compiled in Inductor's cache: n ranks of a machine do the work of one.

    By a lock on a file in the folder of that cache, which a process that dies gives up. Who does
    not get it in the time that Inductor gives its own locks compiles too. once: entered by who has
    it, for the processes of other folders.
    """
    from torch._inductor import config
    from torch._inductor.codecache import LOCK_TIMEOUT, get_lock_dir
    from torch.utils._filelock import FileLock

    if not config.fx_graph_cache or config.force_disable_caches or _compiles_together(config):
        yield
        return
    inputs = [str(node.meta.get("val")) for node in graph.graph.find_nodes(op="placeholder")]
    key = hashlib.sha256("\n".join([graph.code, *inputs]).encode()).hexdigest()  # printed once
    lock = FileLock(str(Path(get_lock_dir()) / f"autoshard-{key}.lock"))
    with contextlib.suppress(OSError, NotImplementedError):  # it saves work, nothing else
        lock.acquire(timeout=LOCK_TIMEOUT)
    try:
        with contextlib.nullcontext() if once is None else once(key):
            yield
    finally:
        lock.release()
