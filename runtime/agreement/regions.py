"""Code in which a rank meets others in collectives: errors that name the rank that is missing."""

import contextlib
import inspect
import linecache
import re
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import torch
from torch import fx

from autoshard.runtime import compat
from autoshard.runtime.agreement.consensus import FAILED, REMEDY, agree, ask, members
from autoshard.runtime.agreement.history import Call, name_of
from autoshard.runtime.agreement.store_exchange import StoreExchange
from autoshard.runtime.agreement.worlds import current_exchange
from autoshard.runtime.collectives import Axis
from autoshard.runtime.errors import AutoshardError, CollectiveError, source_line

_LIBRARY = tuple(
    str(Path(module.__file__ or "").parent)
    for module in (torch, sys.modules["autoshard"], sys.modules["autoshard.runtime"])
)


BRANCHES = (
    "Every rank of a data-parallel axis has to run the same graphs. Code that depends on a rank's "
    "own batch, such as a branch that skips an expert without tokens, must compute on all ranks "
    "(an image's encoder on zeros, its result times zero). On the axis dp_replicate in place of "
    "dp_shard the branches of a training step may differ."
)


class CollectiveRegion:
    """A context in which this thread of this rank runs collectives over some axes.

    A second thread is refused (`Turn`). A collective that fails because a rank does not come
    becomes a CollectiveError with the world's first failure, the same on all ranks that wait; other
    errors pass, and are told to the ranks that miss this one. what: the code, for error texts.
    Meant to be made once and entered at each call; re-entrant. met: the axes of those on which
    each call surely waits for the other ranks; such calls are counted (`CountedRegions`). moved:
    the parameters that each call gathers or reduces, by the name of the axis; ranks compare them
    (`History`), and raise CollectiveError on all of an axis where they differ. lines: those of the
    user's that nodes of the compiled graph are of, by name, as Inductor keeps the names only.
    """

    def __init__(
        self,
        what: str,
        axes: Sequence[Axis],
        met: Sequence[Axis] = (),
        moved: Mapping[str, Sequence[str]] | None = None,
        lines: Mapping[str, str] | None = None,
    ) -> None:
        self._what, self._axes, self._lines = what, axes, lines or {}
        self._exchange: StoreExchange | None = None
        self._entered = 0.0
        self._met = tuple(name_of(members(axis)) for axis in with_processes(met))
        self._calls = [
            (name_of(members(axis)), axis, Call(what, names))
            for axis in with_processes(axes)
            if (names := (moved or {}).get(axis.name))
        ]

    def __enter__(self) -> None:
        exchange, self._entered = current_exchange(), time.monotonic()
        if exchange is not None:
            exchange.enter(self._what)
        self._exchange = exchange
        if exchange is not None:
            if self._met:
                exchange.progress.enter(self._met, self._what)
            try:
                self._compare(exchange)
            except BaseException as error:
                self.__exit__(type(error), error, error.__traceback__)
                raise

    def _compare(self, exchange: StoreExchange) -> None:
        """Count this call, and compare with the other ranks where it is time to."""
        for group, axis, call in self._calls:
            history = exchange.histories[group]
            due = history.add(call, torch.is_grad_enabled(), exchange.every)
            if due and not ask(history.number, axis):
                what, digest = "collectives of the graphs so far", f"{history.number:x}"
                lines = history.lines
                agree(what, digest, lines, axis, error=CollectiveError, remedy=BRANCHES)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        exchange = self._exchange
        if exchange is None:
            return
        if error is None:
            exchange.leave()
            exchange.goes_on()
            return
        exchange.turn.leave()
        if isinstance(error, Exception) and not isinstance(
            error, (AutoshardError, compat.RESTARTS)
        ):
            self._failed(exchange, error)

    def _failed(self, exchange: StoreExchange, error: Exception) -> None:
        """Raise what a failed collective means; tell others of any other error."""
        text = f"{type(error).__name__}: {str(error).strip()}"
        if not compat.is_of_a_collective(error):
            if self._met:
                exchange.progress.undo(self._met)
            for group, _, _ in self._calls:
                exchange.histories[group].undo()
            exchange.raised(text)
            return
        what = f"{self._what}{in_flight(error, self._lines)}"
        if compat.misses_a_rank(error):
            peers = {m: axis.name for axis in self._axes for m in members(axis)}
            waited, gone = time.monotonic() - self._entered, compat.has_lost_a_rank(error)
            failure = exchange.roll_call(what, peers, waited, gone)
        else:
            failure = exchange.fail(exchange.rank, f"{text}, in {what}")
        told = f"{failure}; rank {exchange.rank} was in {what}"
        raise CollectiveError(told, remedy=FAILED) from error


def in_flight(error: BaseException, lines: Mapping[str, str]) -> str:
    """The collective that raised an error, and the user's line that it is of: ", in all_reduce of
    model.py:12"; less where the traceback says less. lines: see `CollectiveRegion`."""
    for note in getattr(error, "__notes__", ()):  # of what passes between stages
        return f", in {note}"
    for frame, number in reversed([*traceback.walk_tb(error.__traceback__)]):
        path = frame.f_code.co_filename
        text = linecache.getline(path, number).strip()
        graph = getattr(frame.f_locals.get("self"), "graph", None)
        if isinstance(graph, fx.Graph):  # a graph that runs operator by operator
            name = text.partition(" = ")[0].partition(":")[0]
            node = next((node for node in graph.nodes if node.name == name), None)
            return "" if node is None else _of_node(node)
        if _OPERATOR.search(text):  # Inductor's code, which names nodes of its graph in comments
            before = [linecache.getline(path, at).strip() for at in range(number, 0, -1)]
            return _of_code(before, lines) or f", in {path}:{number}"
    return ""


_OPERATOR = re.compile(r"_c10d_functional\.(\w+?)_?\.default\(")
_WAITS = torch.ops._c10d_functional.wait_tensor.default


def _of_node(node: fx.Node) -> str:
    operator = node
    while operator.target is _WAITS:
        operator = operator.all_input_nodes[0]
    what = getattr(operator.target, "__name__", str(operator.target)).partition(".")[0]
    while (where := line_of(node)) is None and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return f", in {what} of {where}" if where else f", in {what}"


def line_of(node: fx.Node) -> str | None:
    """The user's line that a node is of: parameters are read in a file of ours."""
    trace = (node.meta.get("stack_trace") or "").splitlines()
    ours = tuple(f'File "{folder}' for folder in _LIBRARY)
    return source_line("\n".join(line for line in trace if not line.strip().startswith(ours)))


def _of_code(before: Sequence[str], lines: Mapping[str, str]) -> str:
    """The same of a line of Inductor's code and those before it, the last one first."""
    waited = re.search(r"wait_tensor\.default\((\w+)", before[0])
    buffer = waited[1] if waited else ""
    called = (found[1] for line in before if (found := _OPERATOR.search(line)) and buffer in line)
    what = next((name for name in called if name != "wait_tensor"), "wait_tensor")
    for line in before:
        names = line.partition("Source Nodes: [")[2].partition("]")[0].split(", ")
        for name in reversed(names):
            if name in lines:
                return f", in {what} of {lines[name]}"
    return ""


@contextlib.contextmanager
def announced(what: str, axes: Sequence[Axis], remedy: str = REMEDY) -> Iterator[None]:
    """Collectives over `axes` that eager code is about to run, such as a gather of a parameter.

    what: the thing done, such as "read of body.up.weight"; the same on every rank. remedy: how to
    have every rank do it. The ranks of
    each axis tell each other first: one that does it alone raises CollectiveError after `timeout`,
    instead of meeting the others in a collective of something else, and they raise it too, with
    this rank's line. A message through the store, and a look at those of the others, for each axis;
    nothing on axes of one rank, without processes, or while a graph is traced. For eager code, on
    every rank of the axes.
    """
    axes = with_processes(axes)
    if not axes or compat.compiling():
        yield
        return
    note = f"{users_line()}; every rank has to do it"
    for axis in axes:
        agree(what, what, [], axis, note=note, error=CollectiveError, remedy=remedy)
    with CollectiveRegion(f"the {what} ({note})", axes):
        yield


def with_processes(axes: Iterable[Axis]) -> list[Axis]:
    """Those of several ranks that are processes: not offline, nor threads in lockstep."""
    return [axis for axis in axes if axis.size > 1 and ":" not in axis.group]


def users_line() -> str:
    """The innermost `file:line` of this thread that is neither torch's nor ours."""
    frame = inspect.currentframe()
    assert frame is not None
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith((*_LIBRARY, "<"))
        or frame.f_code.co_filename == contextlib.__file__
    ):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
