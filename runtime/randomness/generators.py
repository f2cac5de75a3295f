"""Named random states of a rank, and the block of code that draws from one of them.

    default          torch's own generators, as the user seeds them
    data-parallel    alike on the ranks of one tp group, apart between batches
    tensor-parallel  apart on every rank
    expert           apart on every rank, for weights of experts

The seeds follow the rule of Megatron-LM (tensor_parallel/random.py): s, s + 2718 + tp rank and
s + 1024 + 100 * expert rank, where s is torch's seed, folded with the index of the rank's batch
(0 for the first). A state is that of the CPU generator and, where CUDA runs, of the current
device's. Exactly one state is in torch's generators at any time; the others wait here.
"""

import threading
from collections.abc import Mapping
from typing import Any

import torch

from autoshard.runtime import compat
from autoshard.runtime.collectives import Axis
from autoshard.runtime.errors import AutoshardError

DEFAULT, DATA, TENSOR, EXPERT = "default", "data-parallel", "tensor-parallel", "expert"
STREAM = 0x9E3779B97F4A7C15
"""Times the index of a batch: odd, so that no two batches have one seed."""

GeneratorState = dict[str, torch.Tensor]
_int64 = torch.iinfo(torch.int64)
_lock = threading.RLock()


class _Seeding:
    """The seed of torch's CPU generator from which the states stem, and how often it changed."""

    seed: int | None = None
    count = 0

    @classmethod
    def follow(cls) -> None:
        """Notice that torch was seeded: another seed, or a generator that has drawn nothing.

        One number is drawn after that, so that a second seeding with the same seed is noticed.
        """
        seed = torch.initial_seed()
        fresh = torch.Generator().manual_seed(seed).get_state()
        if seed != cls.seed or torch.equal(fresh, torch.get_rng_state()):
            cls.seed, cls.count = seed, cls.count + 1
            torch.randint(2, ())


class Tracker:
    """The named states of one rank.

    tp_rank: the rank on the tp axis. batch: the rank's index among those with other batches.
    cp_rank: the rank on cp beside tp, which names the place of the states and seeds none.
    """

    def __init__(self, tp_rank: int = 0, batch: int = 0) -> None:
        self.tp_rank, self.batch, self.cp_rank = tp_rank, batch, 0
        self.seeds: dict[str, int] = {}
        self.states: dict[str, GeneratorState] = {}
        self.added: dict[str, int] = {}
        self.active = [DEFAULT]
        self.replaying = False
        self._count = -1

    def place(self, tp_rank: int, batch: int, cp_rank: int = 0) -> None:
        """Say where in the mesh this process is; another place seeds the states anew."""
        self.cp_rank = cp_rank
        if (tp_rank, batch) != (self.tp_rank, self.batch):
            self.tp_rank, self.batch, self._count = tp_rank, batch, -1

    def add(self, name: str, offset: int) -> None:
        """A further state, seeded with s + offset. Raises AutoshardError for a name or a seed
        that another state has."""
        self.follow()
        taken = {**self._offsets(), DEFAULT: 0}
        if name in taken or offset in taken.values():
            raise AutoshardError(
                f"the random state {name!r} with offset {offset} is there already",
                remedy=f"Choose a name and an offset other than those of {taken}.",
            )
        self.added[name] = offset
        self._seed(name, offset)

    def follow(self) -> None:
        """Reseed all named states if torch was reseeded since the last call; not in a `fork` block.

        Raises AutoshardError in a backward pass, where only a recomputed forward would draw, and
        other numbers than forward did.
        """
        if self.replaying:
            return
        if compat.in_backward():
            raise AutoshardError(
                "a named random state is used in a backward pass, by a region that is computed "
                "again and would draw other numbers than in forward",
                remedy="Give torch.utils.checkpoint context_fn="
                "autoshard.rng.checkpoint_contexts, or compile the region as a whole.",
            )
        if self.active == [DEFAULT]:
            _Seeding.follow()
        if self._count == _Seeding.count:
            return
        self._count = _Seeding.count
        for name, offset in self._offsets().items():
            self._seed(name, offset)

    def _offsets(self) -> dict[str, int]:
        rank = self.tp_rank
        return {DATA: 0, TENSOR: 2718 + rank, EXPERT: 1024 + 100 * rank, **self.added}

    def _seed(self, name: str, offset: int) -> None:
        base = ((_Seeding.seed or 0) ^ (self.batch * STREAM)) % 2**64
        self.seeds[name] = (base + offset) % 2**64
        self.states[name] = {}

    def state(self, name: str) -> GeneratorState:
        """The position of a state. Raises AutoshardError for a name that is not known."""
        if name != DEFAULT and name not in self.seeds:
            raise AutoshardError(
                f"there is no random state {name!r}",
                remedy=f"Choose one of {[DEFAULT, *self.seeds]}, or add it (autoshard.rng.add).",
            )
        if name == self.active[-1]:
            return _live()
        found = self.states.setdefault(name, {})
        for device in _devices():
            if device not in found:  # a state that was never used, or CUDA that started since
                found[device] = torch.Generator(device).manual_seed(self.seeds[name]).get_state()
        return dict(found)

    def enter(self, name: str) -> None:
        """Put the state `name` into torch's generators until `leave`."""
        self.follow()
        entered = self.state(name)
        self.states[self.active[-1]] = _live()
        self.active.append(name)
        _load(entered)

    def leave(self) -> None:
        """Keep the position of the state entered last, and put back the state before it."""
        self.states[self.active.pop()] = _live()
        _load(self.states[self.active[-1]])

    def draw(self, name: str) -> torch.Tensor:
        """Draw an int64 from the CPU generator of the state."""
        with _lock:
            self.follow()
            generator = torch.Generator()
            if name == self.active[-1]:
                return torch.randint(_int64.min, _int64.max, ())
            generator.set_state(self.state(name)["cpu"])
            drawn = torch.randint(_int64.min, _int64.max, (), generator=generator)
            self.states[name]["cpu"] = generator.get_state()
            return drawn

    def snapshot(self) -> dict[str, GeneratorState]:
        """Every state, the default one included; copies."""
        self.follow()
        return {name: self.state(name) for name in (DEFAULT, *self.seeds)}

    def restore(self, states: Mapping[str, GeneratorState]) -> None:
        """Take the states of a `snapshot`."""
        self.follow()
        for name, state in states.items():
            self.state(name)
            self.states[name] = {device: tensor.clone() for device, tensor in state.items()}
        if self.active[-1] in states:
            _load(self.states[self.active[-1]])
        if self.active == [DEFAULT]:
            _Seeding.seed = torch.initial_seed()


def _devices() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() and torch.cuda.is_initialized() else ["cpu"]


def _live() -> GeneratorState:
    found = {"cpu": torch.get_rng_state()}
    if len(_devices()) > 1:
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def _load(state: GeneratorState) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and len(_devices()) > 1:
        torch.cuda.set_rng_state(state["cuda"])


TRACKER = Tracker()
"""The states of this process."""
_of_thread: dict[tuple[int, int], Tracker] = {}


def tracker_of(axis: Axis, outer: Axis | None = None) -> Tracker:
    """The states of the lockstep thread of a rank of the tp axis, and of cp beside it."""
    with _lock:
        place = axis.rank, 0 if outer is None else outer.rank
        return _of_thread.setdefault(place, Tracker(axis.rank))


@compat.allow_in_graph
def region(name: str | None) -> None:
    """In a traced graph: what follows lies in a `fork(name)`, or, with None, out of the last one.

    Does nothing where it runs: the pass that places random states reads it.
    """


class fork:
    """Draw from the named state inside the block, and from what was before after it.

        with autoshard.rng.fork("tensor-parallel"):
            noise = torch.randn(8)

    Blocks nest, also in themselves. name: a state, see the module. In code that torch.compile
    traces, the block says which of the states a random operator on a shard draws from; whether
    ranks draw alike or apart follows from the plan. Raises AutoshardError for an unknown name.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @compat.never_a_frame
    def __enter__(self) -> None:
        if torch.compiler.is_compiling():
            region(self.name)
        else:
            TRACKER.enter(self.name)

    @compat.never_a_frame
    def __exit__(self, *error: Any) -> None:
        if torch.compiler.is_compiling():
            region(None)
        else:
            TRACKER.leave()
