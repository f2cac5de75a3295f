"""Named random states for one's own code: `with autoshard.rng.fork("tensor-parallel"): ...`.

They are those from which models compiled with `rng="tracker"` draw (docs/randomness.md).
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from autoshard.errors import AutoshardError
from autoshard.runtime import compat
from autoshard.runtime.randomness import TRACKER, GeneratorState, fork

__all__ = ["add", "checkpoint_contexts", "fork", "get_state", "manual_seed", "set_state"]


def manual_seed(seed: int) -> None:
    """torch.manual_seed, and every named state anew.

    torch.manual_seed alone does the same, except where it gives the seed that torch had and
    numbers are drawn before the first use of a named state: that cannot be seen from outside.
    """
    torch.manual_seed(seed)
    TRACKER.follow()


def add(name: str, offset: int) -> None:
    """A further state whose seed is `offset` more than that of "data-parallel".

    Call it alike on all ranks, or with an offset that depends on the rank. Raises AutoshardError
    where another state has that name or that offset.
    """
    TRACKER.add(name, offset)


def get_state() -> dict[str, dict[str, GeneratorState]]:
    """Every state of this rank, for a checkpoint: place in the mesh -> name -> device -> bytes.

    The default state (torch's own generators) is among them. The first key differs between ranks,
    so that torch.distributed.checkpoint keeps the states of all of them.
    """
    return {_place(): TRACKER.snapshot()}


def set_state(states: dict[str, dict[str, GeneratorState]]) -> None:
    """Go on from what `get_state` returned in this place of the mesh.

    Raises AutoshardError where the states are those of other places only.
    """
    if _place() not in states:
        raise AutoshardError(
            f"the random states are those of {sorted(states)}, this rank is {_place()}",
            remedy="On another mesh call torch.manual_seed instead.",
        )
    TRACKER.restore(states[_place()])


def _place() -> str:
    cp = f"_cp{TRACKER.cp_rank}" if TRACKER.cp_rank else ""
    return f"dp{TRACKER.batch}{cp}_tp{TRACKER.tp_rank}"


def checkpoint_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """`context_fn` of torch.utils.checkpoint for eager code that forks inside.

    checkpoint itself puts torch's generators back for the second run; this does it for the named
    states.
    """
    if not compat.in_backward():
        TRACKER.follow()  # before checkpoint looks at torch's generators
    found: list[dict[str, GeneratorState]] = []
    return _remember(found), _replay(found)


@contextmanager
def _remember(found: list[dict[str, GeneratorState]]) -> Iterator[None]:
    found.append(TRACKER.snapshot())
    yield


@contextmanager
def _replay(found: list[dict[str, GeneratorState]]) -> Iterator[None]:
    outer, TRACKER.replaying = TRACKER.replaying, True
    now, live = TRACKER.snapshot(), TRACKER.active[-1]
    # the state in torch's generators is checkpoint's own to put back
    TRACKER.restore({name: state for name, state in found[-1].items() if name != live})
    try:
        yield
    finally:
        TRACKER.restore({name: state for name, state in now.items() if name != live})
        TRACKER.replaying = outer
