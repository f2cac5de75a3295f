"""run_cheaper_rows: each mixture in the form that is cheaper over the calls an engine is made for.

Every expert on every token reads each matrix once; chosen rows are fewer, but their matrices are
looked up, which reads and writes them, before they are read. So the one is cheaper for some tens or
hundreds of tokens, the other for the few of a decode step and for long prompts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import fx

from autoshard.export.rank_graph.experts.chosen_rows import blocks_of, run_chosen_rows
from autoshard.export.rank_graph.experts.mixture import Mixture, mixtures
from autoshard.export.spec import EngineSpec
from autoshard.planning.cost import Cluster, OperatorWork, cluster
from autoshard.runtime import compat

# Layers that find the places of the rows, beside those that both forms have: a kernel each at most.
_PLACING_SECONDS = 5e-5


def run_cheaper_rows(gm: fx.GraphModule, sizes: Mapping[str, str], spec: EngineSpec) -> None:
    """Rewrite `gm.graph` in place; new nodes have no value. sizes: the name of each symbol."""
    machine = cluster(spec.hardware).sheet
    for mixture in mixtures(gm.graph):
        calls = calls_of(mixture, sizes, spec)
        chosen, every = (
            sum(n * seconds(mixture, tokens, form, machine) for tokens, n in calls)
            for form in (True, False)
        )
        if chosen < every:
            run_chosen_rows(mixture)


def calls_of(mixture: Mixture, sizes: Mapping[str, str], spec: EngineSpec) -> list[tuple[int, int]]:
    """(tokens, how many calls of so many): one of the sizes that are optimised for; with a cache
    also one of the fewest tokens for each further token that the cache has room for."""
    extents = spec.extents
    first = {name: extent.optimum for name, extent in extents.items()}
    calls = [(first, 1)]
    if spec.max_length is not None and "sequence" in extents:
        step = {**first, "sequence": extents["sequence"].minimum}
        calls.append((step, max(1, spec.max_length - first["sequence"])))
    size = mixture.picked.meta["val"].shape[1]
    if isinstance(size, int):
        return [(size, sum(n for _, n in calls))]
    expression = compat.size_expression(size)
    return [
        (int(expression.subs({s: at[sizes[str(s)]] for s in expression.free_symbols})), n)
        for at, n in calls
    ]


def rows(mixture: Mixture, tokens: int, chosen: bool) -> int:
    """Rows of a call that go through an expert."""
    if not chosen:
        return mixture.experts * tokens
    return math.prod(blocks_of(tokens, mixture.chosen, mixture.experts))


def seconds(mixture: Mixture, tokens: int, chosen: bool, machine: Cluster) -> float:
    """Roofline seconds of a call: products, matrices that are read (one that is looked up is read,
    written and read again), rows that are read and written."""
    val, count, matrices = mixture.out.meta["val"], rows(mixture, tokens, chosen), mixture.experts
    if chosen:
        matrices = 3 * blocks_of(tokens, mixture.chosen, mixture.experts)[0]
    nbytes = (matrices * mixture.parameters + count * mixture.widths) * val.element_size()
    spent = machine.seconds(OperatorWork(2.0 * count * mixture.parameters, nbytes, val.dtype))
    return spent + (_PLACING_SECONDS if chosen else 0.0)
