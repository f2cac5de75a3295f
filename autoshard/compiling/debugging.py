"""Debugging by environment variables: logs, dumps of graphs, passes left out.

    AUTOSHARD_DEBUG=1|2|3       log each pass; and why it declined; and the graph it left
    AUTOSHARD_DUMP=DIR          write each graph before and after each pass
    AUTOSHARD_DISABLE=a,b|all   leave out optional passes
    AUTOSHARD_UNSHARDED=1       run the model unsharded
    AUTOSHARD_STOP_AFTER=pass   leave out the passes after this one
    AUTOSHARD_QUIET=1           do not say how far a compilation is

Names and levels are checked; what cannot be obeyed is a ConfigError (docs/debugging.md).
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import fx

from autoshard.compiling.rendering import render
from autoshard.errors import AutoshardError, ConfigError, did_you_mean
from autoshard.passes import OPTIONAL, ORDER, Report, Watch
from autoshard.runtime.collectives import Axis
from autoshard.runtime.compat import artifact
from autoshard.runtime.files import write_whole
from autoshard.runtime.mesh import SAME_BATCH

_log = logging.getLogger("autoshard.passes")
_graphs = logging.getLogger("autoshard.graphs")
_programs = itertools.count()

EQUAL_LAYERS = "equal_layers"
"""What AUTOSHARD_DISABLE calls the regions of a graph (`regions.py`), which are no pass."""

_MAY_GO = (*OPTIONAL, EQUAL_LAYERS)


@dataclass(frozen=True)
class Settings:
    """The values of the AUTOSHARD_* variables, checked.

    level: of AUTOSHARD_DEBUG. folder: of AUTOSHARD_DUMP. left_out: the passes that do not run.
    unsharded: run the caller's graph as it is. stop_after: the last pass that runs. quiet: do not
    say how far a compilation is.
    """

    level: int = 0
    folder: Path | None = None
    left_out: tuple[str, ...] = ()
    unsharded: bool = False
    stop_after: str = ""
    quiet: bool = False

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Settings:
        """The settings that AUTOSHARD_* variables spell; ConfigError for what is not known."""
        level = environment.get("AUTOSHARD_DEBUG", "0") or "0"
        if level not in ("0", "1", "2", "3"):
            raise ConfigError(f"AUTOSHARD_DEBUG={level!r} is no level: it takes 0, 1, 2 or 3.")
        folder = environment.get("AUTOSHARD_DUMP", "")
        disable = environment.get("AUTOSHARD_DISABLE", "")
        stop_after = environment.get("AUTOSHARD_STOP_AFTER", "")
        left_out: tuple[str, ...] = ()
        if disable == "all":
            left_out = _MAY_GO
        elif disable not in ("", "0"):
            left_out = tuple(name.strip() for name in disable.split(","))
            for name in left_out:
                if name not in _MAY_GO:
                    _known("AUTOSHARD_DISABLE", name)
                    raise ConfigError(
                        f"AUTOSHARD_DISABLE={name}: without this pass the program is wrong",
                        remedy=f"It takes {', '.join(_MAY_GO)}; or all, for all of these.",
                    )
        unsharded, quiet = (_is_set(f"AUTOSHARD_{name}", environment) for name in _SWITCHES)
        if stop_after:
            _known("AUTOSHARD_STOP_AFTER", stop_after)
        return cls(
            int(level), Path(folder) if folder else None, left_out, unsharded, stop_after, quiet
        )

    def text(self) -> str:
        """The settings that change a program: ranks whose texts differ must not run together."""
        return (
            f"AUTOSHARD_UNSHARDED={int(self.unsharded)}, passes left out {list(self.left_out)}, "
            f"stop after {self.stop_after!r}"
        )


def settings() -> Settings:
    """The settings of this process's environment, and the loggers set up for them."""
    found = Settings.of(os.environ)
    _configure(found.level)
    return found


PATIENCE = 3.0
"""Seconds of a compilation after which it says what it does."""


class WorkShown:
    """What the compilations of this process are at, as the first rank says it on stderr once one
    takes longer than PATIENCE: on a terminal a line that changes and goes, in a log one line.

    Meanwhile the cycle collector looks at young objects only: a twentieth of the time would go into
    scanning graphs that all live on.
    """

    def __init__(self) -> None:
        self._thresholds = gc.get_threshold()
        self._stack: list[str] = []
        self._began, self._shows, self._logged = 0.0, False, False
        self._timer: threading.Timer | None = None

    @contextlib.contextmanager
    def __call__(self, what: str, begins: bool = False) -> Iterator[None]:
        """Around a piece of work; `begins`: also where it is part of no other."""
        if not (self._stack or begins):
            yield
            return
        self._stack.append(what)
        if len(self._stack) == 1:
            self._thresholds = gc.get_threshold()
            gc.set_threshold(*self._thresholds[:2], 1 << 30)
            self._began, self._timer = time.monotonic(), None
            if _rank() == "0" and not settings().quiet:
                self._timer = threading.Timer(PATIENCE, self._patience_is_over)
                self._timer.daemon = True
                self._timer.start()
        self._show()
        try:
            yield
        finally:
            self._stack.pop()
            if not self._stack:
                gc.set_threshold(*self._thresholds)
                if self._timer is not None:
                    self._timer.cancel()
            self._show()

    def _patience_is_over(self) -> None:
        if not self._stack:
            return
        if sys.stderr.isatty():
            self._shows = True
            self._show()
        elif not self._logged:
            self._logged = True
            print(f"autoshard: still at {self._text()}", file=sys.stderr)

    def _text(self) -> str:
        return f"{', '.join(self._stack)} ({time.monotonic() - self._began:.0f} s)"

    def _show(self) -> None:
        if self._shows:
            line = f"autoshard: {self._text()}" if self._stack else ""
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
            self._shows = bool(self._stack)


doing = WorkShown()


def refuse_unsharded(sizes: Mapping[str, int]) -> None:
    """Raise ConfigError where running unsharded would lose the sum of the gradients."""
    data = {name: size for name, size in sizes.items() if name not in SAME_BATCH and size > 1}
    if data:
        spelled = ", ".join(f"{name}={size}" for name, size in data.items())
        raise ConfigError(
            f"AUTOSHARD_UNSHARDED=1 on a mesh with {spelled}: gradients would not be reduced",
            remedy="Use it on axes whose ranks share a batch (cp, tp, pp): every rank does the "
            "same there.",
        )


@dataclass
class DebugWatch(Watch):
    """A Watch that obeys `settings`, for one program: `number` counts them in this process."""

    settings: Settings
    axes: Sequence[Axis] = ()
    number: int = field(default_factory=lambda: next(_programs))
    steps: int = 0

    def runs(self, name: str) -> bool:
        """Raises AutoshardError where a needed pass comes after the one to stop after."""
        stop = self.settings.stop_after
        if stop and ORDER.index(name) > ORDER.index(stop):
            if name not in OPTIONAL:
                where = self.settings.folder
                raise AutoshardError(
                    f"stopped before {name}: AUTOSHARD_STOP_AFTER={stop}, and no program is "
                    "right without it",
                    remedy=f"The graphs so far are in {where}."
                    if where
                    else "Set AUTOSHARD_DUMP to see the graphs so far.",
                )
            return False
        return name not in self.settings.left_out

    def key(self) -> str:
        """A key of this program alone where graphs are shown: a graph from a cache is not made."""
        shows = self.settings.level or self.settings.folder
        return f"{self.settings.text()} {uuid.uuid4() if shows else ''}"

    def before(self, name: str, gm: fx.GraphModule, phase: str = "") -> None:
        self._dump(name, phase, "before", gm)

    def after(self, name: str, gm: fx.GraphModule, report: Report, phase: str = "") -> None:
        """Dump and log."""
        self._dump(name, phase, "after", gm)
        head = f"program {self.number}: {' '.join(filter(None, (phase, name)))}"
        _log.info("%s: %d rewritten, %d declined", head, report.hits, len(report.skips))
        for skip in report.skips:
            _log.debug("%s: declined at %s: %s", head, skip.node, skip.reason)
        if _graphs.isEnabledFor(logging.DEBUG):
            _graphs.debug("%s left\n%s", head, render(gm, axes=self.axes))
        artifact(f"autoshard_{self._name(name, phase)}_after", lambda: render(gm, axes=self.axes))
        self.steps += 1

    def _name(self, name: str, phase: str) -> str:
        return ".".join(filter(None, (f"{self.number:02}-{self.steps:02}-{name}", phase)))

    def _dump(self, name: str, phase: str, side: str, gm: fx.GraphModule) -> None:
        folder = self.settings.folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{self._name(name, phase)}.rank{_rank()}.{side}.txt"
            write_whole(path, render(gm, axes=self.axes, modules=True), "graph")


def _rank() -> str:
    return os.environ.get("RANK", "0")


_SWITCHES = ("UNSHARDED", "QUIET")


def _is_set(variable: str, environment: Mapping[str, str]) -> bool:
    found = environment.get(variable, "0") or "0"
    if found not in ("0", "1"):
        raise ConfigError(f"{variable}={found!r} is neither 0 nor 1.")
    return found == "1"


def _known(variable: str, name: str) -> None:
    if name not in ORDER:
        remedy = did_you_mean(name, ORDER, f"The passes are {', '.join(ORDER)}.")
        raise ConfigError(f"{variable}: there is no pass {name!r}", remedy=remedy)


def _configure(level: int) -> None:
    """Let the loggers `autoshard.*` write to stderr; without AUTOSHARD_DEBUG nothing is touched."""
    top = logging.getLogger("autoshard")
    if not level:
        return
    top.setLevel(logging.INFO if level == 1 else logging.DEBUG)
    _graphs.setLevel(logging.DEBUG if level == 3 else logging.INFO)
    if not top.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"[rank{_rank()}] %(name)s: %(message)s"))
        top.addHandler(handler)
        top.propagate = False
