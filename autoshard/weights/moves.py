"""The reshard plan: who sends which slice of which tensor to whom. Pure, and alike on all ranks.

Every element that a rank wants and does not hold is sent to it once. Of the ranks that hold it, one
of the receiver's node is asked where there is one, and of those the loads are levelled: while a
chain of replicas leads from the fullest sender to one whose load is lower by a slice or more, bytes
move along it. Where no such chain is left, what the reachable senders send is held by nobody else,
so that no plan's fullest sender has less than their mean: the bound of a maximum flow, within a
slice.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autoshard.errors import AutoshardError
from autoshard.weights.boxes import Box, apart, common, cut, elements, slices, without

ALIGNED = 16
"""Bytes at whose multiples a slice begins in a buffer: any dtype may be there."""


class Move(NamedTuple):
    """A slice of a tensor on its way. size: bytes of an element as it travels. A move from a rank
    to itself is a copy."""

    name: str
    box: Box
    sender: int
    receiver: int
    size: int

    @property
    def bytes(self) -> int:
        """Bytes that travel."""
        return elements(self.box) * self.size


class Want(NamedTuple):
    """What a rank wants of a tensor: boxes, and the bytes of an element as it is sent."""

    boxes: tuple[Box, ...]
    size: int


@dataclass(frozen=True)
class Layouts:
    """holds: for each rank the box of each tensor that it has. wants: likewise what it is to have.
    nodes: the node of each rank, whose links are the short ones; a rank that is not named is on
    node 0."""

    holds: Mapping[int, Mapping[str, Box]]
    wants: Mapping[int, Mapping[str, Want]]
    nodes: Mapping[int, int]


class _Item(NamedTuple):
    """A slice that one of several ranks will send."""

    name: str
    box: Box
    receiver: int
    size: int
    senders: tuple[int, ...]


def plan_moves(layouts: Layouts, slice_bytes: int) -> list[Move]:
    """The moves, in the order in which they run; copies first.

    slice_bytes: of a move, at most, where an element has no more. Raises AutoshardError for
    elements that are wanted and that nobody holds.
    """
    copies, items = _lacked(layouts)
    moves = [
        part for move in _shared_out(items, slice_bytes) for part in _sliced(move, slice_bytes)
    ]
    return [*copies, *_in_turns(moves)]


def _lacked(layouts: Layouts) -> tuple[list[Move], list[_Item]]:
    """What each rank copies of its own, and what it lacks, by the ranks that may send it."""
    names = sorted({name for wants in layouts.wants.values() for name in wants})
    copies: list[Move] = []
    items: list[_Item] = []
    known: dict[object, list[tuple[int, Box, tuple[int, ...] | None]]] = {}
    for name in names:
        owners: dict[Box, list[int]] = {}
        for rank in sorted(layouts.holds):
            box = layouts.holds[rank].get(name)
            if box is not None and elements(box):
                owners.setdefault(box, []).append(rank)
        wants = {r: w[name] for r, w in sorted(layouts.wants.items()) if name in w}
        # the layers of a model are alike: one of them is cut
        key = (
            tuple((box, tuple(ranks)) for box, ranks in owners.items()),
            tuple((rank, want.boxes) for rank, want in wants.items()),
        )
        if key not in known:
            known[key] = list(_pieces(name, owners, wants, layouts.nodes))
        for rank, box, senders in known[key]:
            if senders is None:
                copies.append(Move(name, box, rank, rank, wants[rank].size))
            else:
                items.append(_Item(name, box, rank, wants[rank].size, senders))
    return copies, items


def _pieces(
    name: str, owners: Mapping[Box, list[int]], wants: Mapping[int, Want], nodes: Mapping[int, int]
) -> Iterator[tuple[int, Box, tuple[int, ...] | None]]:
    """(receiver, box, the ranks that may send it; None where it has the box itself)."""
    for receiver, want in wants.items():
        own = [box for box, ranks in owners.items() if receiver in ranks]
        left = apart(want.boxes)
        for box in own:
            for one in left:
                if (both := common(one, box)) is not None:
                    yield receiver, both, None
            left = [rest for one in left for rest in without(one, box)]
        for box, ranks in owners.items():
            near = [r for r in ranks if nodes.get(r, 0) == nodes.get(receiver, 0)]
            for one in left:
                if (both := common(one, box)) is not None:
                    yield receiver, both, tuple(near or ranks)
            left = [rest for one in left for rest in without(one, box)]
        if left:
            raise AutoshardError(
                f"rank {receiver} wants {left[0]} of {name}, which no rank holds",
                remedy="Have every rank that holds a part of the model send.",
            )


def _shared_out(items: Sequence[_Item], slice_bytes: int) -> Iterator[Move]:
    """Each item, whole or in parts, by the sender whose turn it is."""
    demands = Counter[tuple[int, ...]]()
    for item in items:
        demands[item.senders] += elements(item.box) * item.size
    shares = levelled(demands, slice_bytes)
    left = {senders: deque(shares[senders].items()) for senders in demands}
    for item in items:
        rest: Box | None = item.box
        queue = left[item.senders]
        while rest is not None:
            sender, share = queue.popleft()
            taken: Box | None = rest
            if not queue or elements(rest) * item.size <= share:
                rest = None
            else:
                taken, rest = cut(rest, share // item.size)
            if taken is not None:
                yield Move(item.name, taken, sender, item.receiver, item.size)
                share -= elements(taken) * item.size
            if rest is None:
                queue.appendleft((sender, share))
            else:  # of a row that is not divided there is something over or under
                queue[0] = (queue[0][0], queue[0][1] + share)


def levelled(
    demands: Mapping[tuple[int, ...], int], slack: int
) -> dict[tuple[int, ...], dict[int, int]]:
    """Bytes by sender, of the demand of each set of senders: the fullest has at most the least that
    any division allows, and `slack`."""
    load = Counter[int]()
    shares: dict[tuple[int, ...], dict[int, int]] = {}
    for senders in sorted(demands, key=lambda one: (len(one), one)):
        shares[senders] = _filled(demands[senders], senders, load)
        load.update(shares[senders])
    of = defaultdict(list)
    for senders in shares:
        for rank in senders:
            of[rank].append(senders)
    while load:
        fullest = min(load, key=lambda rank: (-load[rank], rank))
        chain = _chain(fullest, load, shares, of, slack)
        if chain is None:
            break
        last = chain[-1][2]
        moved = (load[fullest] - load[last]) // 2
        moved = min(moved, *(shares[senders][a] for a, senders, _ in chain))
        for a, senders, b in chain:
            shares[senders][a] -= moved
            shares[senders][b] += moved
        load[fullest] -= moved
        load[last] += moved
    return shares


def _filled(demand: int, senders: Sequence[int], load: Mapping[int, int]) -> dict[int, int]:
    """A demand poured over its senders, the emptiest first, to one level."""
    order = sorted(senders, key=lambda rank: (load[rank], rank))
    count, total = 0, demand
    for rank in order:  # those that lie under the level
        if count and load[rank] * count >= total:
            break
        count, total = count + 1, total + load[rank]
    level, over = divmod(total, count)
    found = dict.fromkeys(senders, 0)
    for i, rank in enumerate(order[:count]):
        found[rank] = level + (i < over) - load[rank]
    return found


def _chain(
    fullest: int,
    load: Mapping[int, int],
    shares: Mapping[tuple[int, ...], Mapping[int, int]],
    of: Mapping[int, list[tuple[int, ...]]],
    slack: int,
) -> list[tuple[int, tuple[int, ...], int]] | None:
    """The shortest way on which the fullest sender's bytes can go to one that has fewer by more
    than the slack: (from, of which set, to) a step."""
    came: dict[int, tuple[int, tuple[int, ...], int] | None] = {fullest: None}
    waiting = deque([fullest])
    while waiting:
        a = waiting.popleft()
        for senders in of[a]:
            if not shares[senders][a]:
                continue
            for b in senders:
                if b in came:
                    continue
                came[b] = step = (a, senders, b)
                if load[b] < load[fullest] - max(slack, 1):
                    found = [step]
                    while (before := came[found[-1][0]]) is not None:
                        found.append(before)
                    return found[::-1]
                waiting.append(b)
    return None


def _sliced(move: Move, slice_bytes: int) -> Iterator[Move]:
    for box in slices(move.box, max(1, slice_bytes // move.size)):
        yield move._replace(box=box)


def _in_turns(moves: Iterable[Move]) -> list[Move]:
    """Moves in an order in which every pair of ranks has its turn: all links are busy."""
    turn = Counter[tuple[int, int]]()
    found = []
    for number, move in enumerate(moves):
        pair = move.sender, move.receiver
        found.append(((turn[pair], (move.receiver - move.sender) % 1_000_003, number), move))
        turn[pair] += 1
    return [move for _, move in sorted(found, key=lambda one: one[0])]


def padded(move: Move) -> int:
    """Bytes of a buffer that a move takes."""
    return -(-move.bytes // ALIGNED) * ALIGNED


def rounds(moves: Iterable[Move], budget: int) -> list[list[Move]]:
    """Moves between ranks in rounds, in which no rank sends and receives more than `budget` bytes
    together, where one move has no more."""
    found: list[list[Move]] = []
    at: dict[int, tuple[int, int]] = {}
    for move in moves:
        if move.sender == move.receiver:
            continue
        ends = [at.get(rank, (0, 0)) for rank in (move.sender, move.receiver)]
        number = max(first for first, _ in ends)
        used = [size if first == number else 0 for first, size in ends]
        if max(used) and max(used) + padded(move) > budget:
            number, used = number + 1, [0, 0]
        while len(found) <= number:
            found.append([])
        found[number].append(move)
        at[move.sender] = number, used[0] + padded(move)
        at[move.receiver] = number, used[1] + padded(move)
    return found
