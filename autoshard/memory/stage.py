"""The bytes a rank holds while it runs one stage of a pipeline, from the stage's graphs, whose
backward is one, or in two parts.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autoshard.compiling import BackwardCut, results_of
from autoshard.memory.phases import TEMPORARIES, Storage, Storages, phases, storages, walk
from autoshard.memory.step import Step
from autoshard.planning import tensor_bytes
from autoshard.runtime.compat import ForwardBackward


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """parameters, gradients: of what the stage reads, gradients as they add up over micro-batches.
    shared: of the whole batch, values that are made of no parameter. kept: of one micro-batch from
    its forward to its backward; live: the most micro-batches of which it is. late, waiting: the
    same from the first part of a backward to the second, where it has two. together: the most that
    all micro-batches have at once, with what the one at work makes and frees.
    """

    parameters: int
    gradients: int
    shared: int
    kept: int
    live: int
    together: int
    late: int = 0
    waiting: int = 0

    @property
    def peak(self) -> int:
        """The most of all together, in a call; the optimizer's state is beside it."""
        return self.parameters + self.gradients + self.shared + self.together


def memory_of_stage(
    graphs: ForwardBackward, count: int, received: int, live: int, **resident: int
) -> StageMemory:
    """What a stage holds. graphs: of one micro-batch, run operator by operator, whose first inputs
    are so many parameters. received: bytes of a micro-batch from the stage before. resident: the
    fields of what is there all the time.
    """
    made = phases(graphs, range(count), held=True)  # autograd's caller has them
    step = Step(phases=made, resident={}, gradients=0, scratch=0)
    moments = [each for each in step.moments() if each.phase != "optimizer"]
    most, kept = max(each.bytes for each in moments), received + step.activations
    together = (live - 1) * kept + received + most
    return StageMemory(kept=kept, live=live, together=together, **resident)


@dataclass(frozen=True)
class _Parts:
    """Bytes of one micro-batch. kept: from its forward on; late: from its backward by inputs to
    that by weights. most: while each of the three runs ("F", "I", "W"), all of its own among it."""

    kept: int
    late: int
    most: Mapping[str, int]


def memory_of_split_stage(
    cut: BackwardCut,
    received: Sequence[int],
    passed: int,
    actions: Iterable[str],
    **resident: int,
) -> StageMemory:
    """What a stage holds. cut: its graphs. received: bytes of each of a micro-batch's values from
    the stage before that it reads, the last inputs; passed: of those that it hands on only.
    actions: "F", "I" or "W" of each, in their order. resident: as of `memory_of_stage`.
    """
    parts = _parts(cut, list(received), passed)
    kept = late = together = live = waiting = 0
    for work in actions:
        kept -= work == "I"
        late -= work == "W"
        together = max(together, kept * parts.kept + late * parts.late + parts.most[work])
        kept += work == "F"
        late += work == "I"
        live, waiting = max(live, kept), max(waiting, late)
    return StageMemory(
        kept=parts.kept,
        live=live,
        late=parts.late,
        waiting=waiting,
        together=together,
        **resident,
    )


def _parts(cut: BackwardCut, received: list[int], passed: int) -> _Parts:
    given: dict[str, Storages] = {node.name: () for node in cut.given}
    arrived = [Storage(nbytes, TEMPORARIES) for nbytes in received]
    own = cut.given[len(cut.given) - len(received) :]
    given.update((node.name, (storage,)) for node, storage in zip(own, arrived))

    held = _held(cut.forward, given)
    made = results_of(cut.forward)[cut.results :]
    known = {**given, **{node.name: held[node] for node in made if node is not None}}
    saved = {*_all(known.values()), *arrived}
    forward = sum(received) + passed + _most(cut.forward, held, set(arrived), kept=set(arrived))

    tangents: dict[str, Storages] = {
        node.name: (Storage(tensor_bytes(node.meta["val"]), TEMPORARIES),)
        for node in cut.read
        if node.name not in known
    }
    known |= tangents
    held = _held(cut.by_inputs, known)
    gradients = results_of(cut.by_inputs)
    known |= {n.name: held[n] for n in gradients[cut.inputs :] if n is not None}
    totals = {node.name for node in cut.totals}
    read_late = [
        node.name
        for node in cut.by_weights.graph.find_nodes(op="placeholder")
        if node.name not in totals
    ]
    late = set(_all(known[name] for name in read_late))
    first = saved | set(_all(tangents.values()))
    by_inputs = _bytes(first) + passed
    there = {*arrived, *_all(tangents.values())}  # until the end, whoever reads them
    by_inputs += _most(cut.by_inputs, held, first, kept=late | there)

    held = _held(cut.by_weights, {name: known[name] for name in read_late})
    by_weights = _bytes(late) + _most(cut.by_weights, held, late, kept=set())
    most = {"F": forward, "I": by_inputs, "W": by_weights}
    return _Parts(_bytes(saved) + passed, _bytes(late), most)


def _held(gm: fx.GraphModule, known: Mapping[str, Storages]) -> dict[fx.Node, Storages]:
    inputs = {n: known.get(n.name, ()) for n in gm.graph.find_nodes(op="placeholder")}
    return storages(gm.graph, inputs, TEMPORARIES)


def _most(
    gm: fx.GraphModule, held: Mapping[fx.Node, Storages], inputs: set[Storage], kept: set[Storage]
) -> int:
    """The most bytes beside `inputs` while a graph runs, which frees them but for `kept`."""
    unread = inputs - set(_all(held.values())) - kept  # gone at once
    alive = most = -_bytes(unread)
    for _, made, freed in walk(gm.graph, held, inputs):
        alive += _bytes(made)
        most = max(most, alive)
        alive -= _bytes(storage for storage in freed if storage not in kept)
    return most


def _all(held: Iterable[Storages]) -> Iterable[Storage]:
    return (storage for each in held for storage in each)


def _bytes(found: Iterable[Storage]) -> int:
    return sum(storage.nbytes for storage in found)
