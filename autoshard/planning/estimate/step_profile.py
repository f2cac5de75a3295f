"""What one planned graph does on one rank of its tp axis: arithmetic, communication, memory.

Made once for each size of the tp axis. The data-parallel axes change none of it, because the batch
of a data-parallel rank is its own: they add gathers and reductions of parameters, which
`estimate/mesh.py` lays over this profile for every way to split the rest of the world.

Operators take roofline time on the shapes of one rank (planning/cost.py), at the rates the cluster
gets of its data sheet. The backward of a product costs one product for each operand that has a
gradient; that of attention, which computes its scores again, 2.5 times its forward (T. Dao,
"FlashAttention-2", 2023, section 3.3); of anything else, twice its memory traffic.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from autoshard.planning import cost
from autoshard.planning.cost import Cluster, Fusing
from autoshard.planning.decisions import Decisions, Recomputation
from autoshard.planning.estimate.memory import RankHolds, held, recomputed
from autoshard.planning.estimate.operator_time import OperatorTimes, dtype_of
from autoshard.planning.estimate.traffic import Sent, expert_rows, tp_collectives
from autoshard.planning.estimate.weights import Training
from autoshard.planning.mixtures import is_mixture
from autoshard.planning.strategy import operands
from autoshard.planning.values import differentiable


@dataclass(frozen=True, kw_only=True)
class Profile(RankHolds):
    """One rank of a tp axis of `n`, whatever the data-parallel axes.

    forward, backward: seconds of compute at each operator. sent: the collectives on tp.
    exchanges: what each mixture sends whose rows travel over ep. flops: operations of the serial
    model, forward and backward, by which utilisation is counted (PaLM's MFU: no
    recomputation). peak: operations a second of the device, in the dtype of most of them. fusing:
    which collectives are one operator with the products beside them.
    """

    n: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    flops: float
    peak: float
    sent: tuple[Sent, ...]
    exchanges: tuple[tuple[Sent, ...], ...] = ()
    fusing: Fusing | None = None

    @property
    def compute(self) -> float:
        """Seconds of compute of a step."""
        return sum(self.forward) + sum(self.backward)


def with_recomputation(one: Profile, chosen: Recomputation) -> Profile:
    """A profile made without recomputation, with a choice of what is computed again.

    The time lies where the backward's does.
    """
    whole = sum(one.backward)
    more = 1 + chosen.seconds / whole if whole else 1.0
    return replace(
        one,
        backward=tuple(more * seconds for seconds in one.backward),
        activations=recomputed(one.activations, chosen),
    )


def profile(
    gm: fx.GraphModule,
    decisions: Decisions,
    parameters: Mapping[fx.Node, str],
    n: int,
    cluster: Cluster,
    bucket_bytes: int | None = None,
    training: Training | None = None,
) -> Profile:
    """The profile of `gm` under `decisions` on an axis of `n` ranks.

    bucket_bytes: as in Config.
    """
    chosen, decisions = decisions.recomputation, replace(decisions, recomputation=None)
    training, prices = training or Training(), decisions.prices
    times = OperatorTimes(gm, n, cluster, training, prices.parts, decisions.losses)
    nodes = list(gm.graph.nodes)
    forward, backward = [0.0] * len(nodes), [0.0] * len(nodes)
    by_dtype: dict[torch.dtype, float] = {}
    for i, node in enumerate(nodes):
        strategy = decisions.strategies.get(node)
        if node.op != "call_function" or strategy is None or times.kernels.is_view(node):
            continue
        forward[i] = times.seconds(node, strategy)
        waits = strategy.waits * cost.WAIT_SECONDS  # in forward only
        backward[i] = (forward[i] - waits) * _backward(node)
        if node in times.chunked.inside or node in times.chunked.gradients:
            backward[i] = times.scaling(node)
        own = cost.node_flops(node) * (1 + min(2.0, _backward(node)))
        by_dtype[dtype_of(node)] = by_dtype.get(dtype_of(node), 0.0) + own
    main = max(by_dtype, key=lambda d: by_dtype[d], default=torch.float32)
    kept = held(gm, decisions, parameters, n, training)
    one = Profile(
        n=n,
        forward=tuple(forward),
        backward=tuple(backward),
        flops=sum(by_dtype.values()),
        peak=cluster.device.peak(main),
        sent=tuple(tp_collectives(gm, decisions, n, bucket_bytes)),
        exchanges=tuple(expert_rows(gm, decisions, n, training.imbalance)),
        fusing=prices.fusing,
        **vars(kept),
    )
    return one if chosen is None else with_recomputation(one, chosen)


def _backward(node: fx.Node) -> float:
    """The time of the backward in units of the forward's."""
    if not differentiable(node):
        return 0.0
    if cost.is_attention(node):
        return 2.5
    if is_mixture(node):
        x, _, _, *stacks = map(differentiable, operands(node))
        return float(x + any(stacks))
    if cost.node_flops(node):
        return float(sum(differentiable(t) for t in operands(node)[:2]))
    return 2.0
