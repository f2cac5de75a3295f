"""In whose memory Inductor makes a value: the two ways in which its code uses memory again.

A loop writes its result over an operand as large that nobody reads afterwards
(`SchedulerNode.decide_inplace_update`). And what loops and products make goes to the memory of the
last dead value as large, if the step then needs no more at its peak (`AllocateLine.plan` in
codegen/wrapper.py): that value is kept for it, and so is alive for longer.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from autoshard.memory.liveness import Kernel, Storage, freed_after, last_uses


def reused_memory(
    run: Sequence[Kernel], inputs: Iterable[Storage] = (), foreign: Container[Storage] = ()
) -> dict[Storage, Storage]:
    """By storage, the dead one whose memory it gets.

    inputs: storages of the graph's inputs, which are freed and, unless they are `foreign`, may be
    written over.
    """
    given = set(inputs)
    over = _written_over(run, given, foreign)
    kept = set(over.values())
    freed = freed_after(run)
    seen, alive, now = set(given), [], sum(s.nbytes for s in given)
    made: list[list[Storage]] = []
    for kernel, after in zip(run, freed):
        written = dict.fromkeys(s for _, writes in kernel.parts for s in writes)
        new = [s for s in dict.fromkeys(kernel.writes) if s not in seen]
        seen.update(new)
        made.append([s for s in new if s not in over])
        now += sum(s.nbytes for s in new)
        never = sum(s.nbytes for s in written if s not in seen)
        alive.append(now + never)
        now -= sum(s.nbytes for s in after)
    for heir, old in over.items():  # what is in the memory of an input is not pooled either
        if old in given:
            given.add(heir)
    free = [[s for s in each if s not in kept and s not in given] for each in freed]
    return over | _from_pool(run, made, free, alive)


def _written_over(
    run: Sequence[Kernel], given: set[Storage], foreign: Container[Storage]
) -> dict[Storage, Storage]:
    last = last_uses(run)
    seen, over, taken = set(given), dict[Storage, Storage](), set[Storage]()
    for i, kernel in enumerate(run):
        for p, (reads, writes) in enumerate(kernel.parts if kernel.loop[0] else ()):
            later = {s for others, _ in kernel.parts[p + 1 :] for s in others}
            for new in writes:
                if new in seen or new not in kernel.writes:
                    continue
                for old in reads:
                    dead = last.get(old) == i and old not in later and old not in taken
                    if dead and old.nbytes == new.nbytes and old in seen and old not in foreign:
                        over[new] = old
                        taken.add(old)
                        break
        seen.update(kernel.writes)
    return over


def _from_pool(
    run: Sequence[Kernel],
    made: Sequence[Sequence[Storage]],
    freed: Sequence[Sequence[Storage]],
    alive: list[int],
) -> dict[Storage, Storage]:
    peak = max(alive, default=0)
    pool: dict[int, list[tuple[Storage, int]]] = {}
    found: dict[Storage, Storage] = {}
    for i, kernel in enumerate(run):
        for new in made[i] if kernel.planned else ():
            waiting = pool.get(new.nbytes)
            if not waiting:
                continue
            old, since = waiting[-1]
            between = range(since + 1, i)
            if max((alive[j] for j in between), default=0) + new.nbytes <= peak or not between:
                waiting.pop()
                found[new] = old
                for j in between:
                    alive[j] += new.nbytes
        for old in freed[i]:
            pool.setdefault(old.nbytes, []).append((old, i))
    return found
