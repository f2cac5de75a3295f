"""The bytes a rank holds in a training step, from the plan: the one account of memory of a plan.

`memory_budget`, `autoshard plan` and the alternatives of `explain` ask it. `Program.memory` is the
exact account, of the graphs that run.

Activations: what the forward pass keeps for the backward pass, estimated from the plan alone.

The exact answer is AOTAutograd's partition of the joint graph, which takes minutes on a deep model
for each mesh; this takes one pass over the serial graph. Each operator's derivative needs some of
its operands or its result (`_needs`). A needed value that a kernel writes to memory is kept; one
that lives inside a fused kernel is computed again from what that kernel reads, where keeping that
takes fewer additional bytes: a greedy form of the minimum cut that torch's partitioner solves (its
own account: H. He and S. Zhang, "Min-cut optimal(*) recomputation with AOTAutograd", 2022).
Attention is assumed to be of the flash kind (T. Dao et al., "FlashAttention", 2022): it keeps its
operands, its result and one number a row, never the scores.

Not counted: regions of activation checkpointing (all counts as if there were none).
"""

from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace

import torch
from torch import fx

from autoshard.planning import cost
from autoshard.planning.chunked_loss import chunks_of
from autoshard.planning.cost import tensor_bytes
from autoshard.planning.decisions import Decisions, Recomputation
from autoshard.planning.estimate.weights import (
    Layout,
    Training,
    Weight,
    buckets,
    sent_bytes,
    weights_of,
)
from autoshard.planning.fusion import Kernels
from autoshard.planning.mixtures import inner_bytes, is_mixture, row_bytes
from autoshard.planning.operators import (
    ADDED_PRODUCTS,
    ATTENTION,
    INDEX_DERIVATIVES,
    LOSSES,
    packet,
)
from autoshard.planning.strategy import operands, parts_of, results, value
from autoshard.planning.values import differentiable, fusible
from autoshard.runtime.collectives import I, State, forward_value
from autoshard.runtime.graph_meta import BUFFER

aten = torch.ops.aten
_ops = torch.ops.autoshard

_RESULT = {
    *(aten.softmax, aten._softmax, aten.log_softmax, aten._log_softmax, aten.sigmoid),
    *(aten.tanh, aten.exp, aten.rsqrt, aten.sqrt, aten.relu, aten.reciprocal),
}
_NOTHING = {
    *(aten.add, aten.sub, aten.rsub, aten.neg, aten.sum, aten.mean, aten.cat, aten.stack),
    *(aten._to_copy, aten.to, aten.clone, aten.contiguous, aten.repeat, aten.constant_pad_nd),
    *(aten.pad, aten.detach, aten.cumsum, aten.roll, aten.flip, aten.index_put),
    *(_ops.dropout, _ops.native_dropout, _ops.feature_dropout),  # drawn again from the seed
}


@dataclass(frozen=True)
class SavedForBackward:
    """What a rank keeps of its activations.

    saved: bytes kept from the forward for the backward. transient: bytes that are there beside
    them at the worst single operator of the backward. weights: the parameters that the backward
    reads; an embedding's table is none.
    """

    saved: int
    transient: int
    weights: frozenset[fx.Node] = frozenset()


class Saving:
    """What the derivatives of one planned graph read, with its bytes on a rank."""

    def __init__(
        self, gm: fx.GraphModule, decisions: Decisions, n: int, training: Training | None = None
    ) -> None:
        training = training or Training()
        self.gm, self.decisions, self.n = gm, decisions, n
        self.compiled, self.imbalance = training.compiled, training.imbalance
        self.kernels = Kernels(gm, self.compiled)
        self.chunked = chunks_of(decisions.losses)
        self.found: dict[tuple[fx.Node, State], int] = {}

    def run(self) -> SavedForBackward:
        """What is kept where the compiler decides."""
        later: list[fx.Node] = []
        weights: set[fx.Node] = set()
        rows = 0
        for node in self.gm.graph.nodes:
            if node.op != "call_function" or self.kernels.is_view(node):
                continue
            if not differentiable(node):
                continue
            if node in self.chunked.gradients:
                self.found[node, I] = self.chunked.gradients[node].kept
                continue
            if packet(node) in ATTENTION:
                rows += self.rows(node)
            rows += self.inner(node)
            if packet(node) in LOSSES and self.decisions.strategies[node].impl is None:
                # its logarithms of probabilities, which no partition computes twice
                scores, state = operands(node)[0], self.decisions.strategies[node].inputs[0]
                self.found[node, state] = self.nbytes(scores, state)
                continue
            for tensor, want in self.needs(node):
                if self.kernels.base[tensor] in self.decisions.stored:
                    weights.add(self.kernels.base[tensor])
                if self.moved(tensor, want):
                    if not self.decisions.gathers_again(tensor, self.decisions.state(tensor), want):
                        self.found[tensor, forward_value(want)] = self.nbytes(tensor, want)
                elif self.in_memory(self.kernels.base[tensor]):
                    self.found.update(self._keep(self.kernels.base[tensor]))
                else:
                    later.append(self.kernels.base[tensor])
        for node in dict.fromkeys(later):
            self.found.update(self._cheapest(node))
        saved = sum(self.found.values()) + rows
        return SavedForBackward(saved, self._transient(), frozenset(weights))

    def needs(self, node: fx.Node) -> list[tuple[fx.Node, State]]:
        """The (value, state it is used in) that the derivative of `node` reads."""
        strategy = self.decisions.strategies[node]
        operator, tensors = packet(node), operands(node)
        if node in self.chunked.inside or node in self.chunked.gradients:
            return []
        used = list(zip(tensors, strategy.inputs, strict=True))
        result = [(node, strategy.outputs[0])]
        if operator in _NOTHING:
            return []
        if operator in ATTENTION:
            return used + result
        if operator in _RESULT:
            return result
        if operator in INDEX_DERIVATIVES:
            return [(t, s) for t, s in used if not differentiable(t)]
        if operator in LOSSES:
            return used
        if is_mixture(node):  # its rows are counted apart, and biases are only added
            return [(t, s) for t, s in used[3:] if value(t).dim() > 2]
        if cost.node_flops(node) or operator in (aten.mul, aten.div):
            two = used[1:3] if operator in ADDED_PRODUCTS else used[:2]
            return [
                pair
                for i, pair in enumerate(two)
                if any(differentiable(t) for t, _ in two[:i])
                or any(differentiable(t) for t, _ in two[i + 1 :])
            ] + (used[2:] if operator == aten.lstm else [])
        return [(t, s) for t, s in used if differentiable(t)]

    def in_memory(self, node: fx.Node) -> bool:
        """Whether the value is in memory anyway; a loss reads its operand through a kernel."""
        if node.op != "call_function" or not fusible(node):
            return True
        readers = self.kernels.readers.get(node, [])
        return self.kernels.writes(node) and not all(
            packet(reader) in LOSSES or reader.op == "output" for reader in readers
        )

    def _keep(self, node: fx.Node) -> dict[tuple[fx.Node, State], int]:
        """Keeping what a node made; parameters, inputs and constants are there without it."""
        if node.op != "call_function" or node not in self.decisions.strategies:
            return {}
        state = self.decisions.state(node)
        return {(node, forward_value(state)): self.nbytes(node, state)}

    def _cheapest(self, node: fx.Node) -> dict[tuple[fx.Node, State], int]:
        """Keep the value of `node`, or what its kernel computed it from: the fewer new bytes."""
        if self.in_memory(node):
            return self._keep(node)
        itself = self._keep(node)
        sources: dict[tuple[fx.Node, State], int] = {}
        strategy = self.decisions.strategies.get(node)
        for tensor, want in zip(operands(node), strategy.inputs if strategy else ()):
            if self.moved(tensor, want):
                sources[tensor, forward_value(want)] = self.nbytes(tensor, want)
            else:
                sources.update(self._cheapest(self.kernels.base[tensor]))
            if self._new(sources) > self._new(itself):
                return itself
        return sources

    def _new(self, kept_too: dict[tuple[fx.Node, State], int]) -> int:
        return sum(size for key, size in kept_too.items() if key not in self.found)

    def _transient(self) -> int:
        """The gradient of the largest value in memory, and the value where it is not kept.

        A loss that is not compiled makes the gradient of its scores of that of their logarithms.
        """
        each = (max(one.scratch, one.scaled) for one in self.chunked.gradients.values())
        largest = max(each, default=0)
        for node in self.gm.graph.nodes:
            if packet(node) in LOSSES and not self.compiled:
                state = self.decisions.strategies[node].inputs[0]
                largest = max(largest, 2 * self.nbytes(operands(node)[0], state))
            if node.op == "call_function" and differentiable(node) and node.users:
                if isinstance(value(node), torch.Tensor) and self.in_memory(node):
                    state = self.decisions.state(node)
                    here = (node, forward_value(state)) in self.found
                    largest = max(largest, self.nbytes(node, state) * (1 if here else 2))
                if is_mixture(node):
                    strategy = self.decisions.strategies[node]
                    widest = row_bytes(node, strategy, self.n)[1]
                    largest = max(largest, int(self.imbalance * widest))
        return largest

    # Sizes and states

    def inner(self, node: fx.Node) -> int:
        """Bytes of the rows inside of a mixture, on the rank that has most; of another node 0."""
        return int(self.imbalance * inner_bytes(node, self.decisions.strategies[node], self.n))

    def rows(self, node: fx.Node) -> int:
        """The float32 number that attention keeps of each of its rows."""
        query = operands(node)[0]
        each = 4 * cost.numel(value(query)) // cost.hint(value(query).shape[-1])
        return each // parts_of(self.decisions.strategies[node].inputs[0], self.n)

    def moved(self, tensor: fx.Node, want: State) -> bool:
        """Whether a value is used in another state than it is made in."""
        return forward_value(self.decisions.state(tensor)) != forward_value(want)

    def nbytes(self, node: fx.Node, state: State) -> int:
        """Bytes of a value in a state, on this rank; none of logits that are never whole."""
        if node in self.chunked.inside:
            return 0
        return sum(map(tensor_bytes, results(node))) // parts_of(state, self.n)


@dataclass(frozen=True, kw_only=True)
class RankHolds:
    """What a rank of a tp axis holds, whatever the data-parallel axes. buffers: their bytes."""

    weights: tuple[Weight, ...]
    activations: SavedForBackward
    buffers: int


def held(
    gm: fx.GraphModule,
    decisions: Decisions,
    parameters: Mapping[fx.Node, str],
    n: int,
    training: Training | None = None,
) -> RankHolds:
    """What a rank of an axis of `n` holds of `gm` under `decisions`."""
    activations = Saving(gm, decisions, n, training).run()
    if decisions.recomputation is not None:
        activations = recomputed(activations, decisions.recomputation)
    return RankHolds(
        weights=weights_of(gm, decisions, parameters, n, activations.weights),
        activations=activations,
        buffers=sum(tensor_bytes(value(node)) for node in gm.graph.nodes if node.meta.get(BUFFER)),
    )


def recomputed(free: SavedForBackward, chosen: Recomputation) -> SavedForBackward:
    """What a rank keeps under a choice of what is computed again; `free`: without one."""
    transient = free.transient + chosen.peak - chosen.kept
    return replace(free, saved=chosen.kept, transient=transient)


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes one rank holds at the worst moment of a step, by kind.

    gradients: whole ones until the last microbatch where its layout says so. activations: saved
    for the backward, and the largest gradient that passes. buckets: parameters
    gathered and gradients waiting for their reduction. buffers: the model's own.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buckets: int
    buffers: int

    @property
    def total(self) -> int:
        """The sum of all kinds."""
        return sum(astuple(self))


def footprint(held: RankHolds, layout: Layout, training: Training) -> Footprint:
    """The memory of a rank. Exact for parameters, gradients, optimizer and buffers; activations
    (`Saving`) and buckets, two of them at work at once, are models."""
    each = [weight.holds(weight.stored_part(layout), training) for weight in held.weights]
    gradients = sum(one.gradient for one in each)
    if layout.deferred and layout.shard > 1 and training.microbatches > 1:
        gradients = sent_bytes(held.weights, lambda weight: weight.numel, training)
    return Footprint(
        parameters=sum(one.stored for one in each),
        gradients=gradients,
        optimizer=sum(one.states for one in each),
        activations=held.activations.saved + held.activations.transient,
        buckets=_bucket_bytes(held, layout, training),
        buffers=held.buffers,
    )


def _bucket_bytes(held: RankHolds, layout: Layout, training: Training) -> int:
    if layout.shard * layout.replicate == 1:
        return 0
    gathered, kept, reduced = [], 0, []
    for bucket in buckets(held.weights, layout):
        nbytes = [(w.gathered(layout) * w.itemsize, w.gathered_twice(layout)) for w in bucket]
        gathered.append(sum(size for size, twice in nbytes if twice))
        kept += sum(size for size, twice in nbytes if not twice)
        reduced.append(sent_bytes(bucket, lambda weight: weight.whole(layout), training))
    # a gradient bucket is there twice: its members, and the joined one that is sent
    sending = 2 * max(reduced, default=0)
    if layout.shard == 1:
        return sending
    return kept + max((a + b for a, b in zip(gathered, [*gathered[1:], 0])), default=0) + sending
