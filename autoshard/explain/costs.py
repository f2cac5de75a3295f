"""What each collective of a program costs and which line causes it; the data behind `explain`."""

import linecache
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import fx

from autoshard.compiling import Built, Collective
from autoshard.passes import WAIT, start_of
from autoshard.planning import cost
from autoshard.planning.cost import START_SECONDS, work_of
from autoshard.runtime.collectives import EXCHANGES, FUSED_PRODUCTS, P
from autoshard.runtime.operators import CHUNKED_LOSS


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Equal collectives of equal places in repeated layers, together.

    seconds: predicted, of all `count` of them, were nothing overlapped. sent: bytes a rank sends,
    of all. hidden: seconds of these that matrix products between the start and the wait cover, at
    most. bytes: the logical size of one. modules: the path of each one's cause, in order of
    issue. line: `file:line` of the user's code that causes it ("" where it is not known); code:
    that line's text.
    """

    op: str
    axis: str
    phase: str
    change: str
    bytes: int
    seconds: float
    sent: float
    hidden: float
    modules: tuple[str, ...]
    line: str
    code: str

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.modules)


def costs(
    built: Built, collectives: Sequence[Collective], windows: Mapping[fx.Node, float]
) -> list[Cost]:
    """The collectives of a step in groups, the dearest first. windows: `hidden_windows`."""
    groups: dict[tuple[str, ...], list[Collective]] = defaultdict(list)
    for one in collectives:
        module, line = cause(one)
        source, _, change = one.change.partition(": ")
        if source.startswith("bucket of"):
            change = f"{change} ({source})"
        key = (one.op, one.axis, one.phase, change, str(one.bytes), folded(module), line)
        groups[key].append(one)
    found = []
    for (op, axis, phase, change, _, _, line), members in groups.items():
        found.append(
            Cost(
                op=op,
                axis=axis,
                phase=phase,
                change=change,
                bytes=members[0].bytes,
                seconds=sum(seconds(built, one) for one in members),
                sent=sum(sent(built, one) for one in members),
                hidden=sum(hidden(built, one, windows) for one in members),
                modules=tuple(cause(one)[0] for one in members),
                line=line,
                code=code(line),
            )
        )
    # sorted is stable: of equals, the first issued
    return sorted(found, key=lambda one: -one.seconds)


def cause(one: Collective) -> tuple[str, str]:
    """(module, `file:line`) that a collective is there for.

    A partial sum is reduced because of the operator that made it; anything else is moved because
    of the operator that reads it. A bucket has the line of its first member.
    """
    source, _, change = one.change.partition(": ")
    if not one.reader_line or change.startswith(f"{P} ->"):
        return one.module, one.stack
    return one.module if source.startswith("bucket of") else one.reader, one.reader_line


def hidden_windows(built: Built) -> dict[fx.Node, float]:
    """By collective: seconds of the matrix products between its start and its wait.

    Two collectives in flight at once count the same products, so it is what can be hidden at most.
    Of one that is one operator with its products, these.
    """
    found: dict[fx.Node, float] = {}
    for gm in (built.joint.forward, built.joint.backward):
        before: dict[fx.Node, float] = {}
        elapsed = 0.0
        for node in gm.graph.nodes if gm is not None else ():
            before[node] = elapsed
            if node.target in (*EXCHANGES, CHUNKED_LOSS):
                found[node] = 0.0  # which waits by itself
            if node.target is WAIT and (start := start_of(node)) in before:
                found.setdefault(start, elapsed - before[start])
            elif cost.node_flops(node):
                took = built.machine.seconds(work_of(node))
                elapsed += took
                if node.target in FUSED_PRODUCTS:
                    found[node] = took
    return found


def hidden(built: Built, one: Collective, windows: Mapping[fx.Node, float]) -> float:
    """Seconds of one collective that products cover, at most; as one operator with them, less what
    starting that takes."""
    covered = min(seconds(built, one), windows[one.node])
    return max(0.0, covered - START_SECONDS) if one.fused else covered


def seconds(built: Built, one: Collective) -> float:
    """Predicted seconds of one collective on its axis."""
    ranks, link = built.mesh.axis(one.axis).size, built.machine.real_links[one.axis]
    served = built.joint.backward is None
    return cost.collective_seconds(_like(one.op), one.bytes, ranks, link, served)


def sent(built: Built, one: Collective) -> float:
    """Bytes a rank sends for one collective."""
    return cost.ring_bytes(_like(one.op), one.bytes, built.mesh.axis(one.axis).size)


def _like(op: str) -> str:
    """A broadcast in a ring passes on what an all-gather does."""
    return "all_gather" if op == "broadcast" else op


def code(line: str) -> str:
    """The text of a `file:line`; "" where the file is not there."""
    path, _, number = line.rpartition(":")
    return linecache.getline(path, int(number)).strip() if number.isdigit() else ""


def short(line: str) -> str:
    """`model.py:41` of a `file:line`: its folder is seldom in doubt."""
    return Path(line).name if line else ""


def folded(path: str) -> str:
    """`model.layers.7.mlp` -> `model.layers.*.mlp`: the place in a layer, whichever layer."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def named(paths: Iterable[str]) -> str:
    """One path as it is; of several, `model.layers.0-31.mlp`, or `*` where numbers are left out."""
    distinct = list(dict.fromkeys(paths))
    if len(distinct) == 1:
        return distinct[0]
    parts = [path.split(".") for path in distinct]
    result = []
    for names in zip(*parts):
        numbers = sorted({int(name) for name in names if name.isdigit()})
        if len(set(names)) == 1:
            result.append(names[0])
        elif numbers == list(range(numbers[0], numbers[-1] + 1)):
            result.append(f"{numbers[0]}-{numbers[-1]}")
        else:
            result.append("*")
    return ".".join(result)
