"""`Program.explain()`: the plan, where each parameter is and why, what each collective costs."""

from collections import Counter
from collections.abc import Mapping

import torch

from autoshard.compiling import EQUAL_LAYERS, Built, layer_of, not_captured, parts_of, settings
from autoshard.explain import text_costs
from autoshard.explain.costs import folded, named
from autoshard.explain.facts import Facts
from autoshard.explain.text_costs import human, page_width, table
from autoshard.memory import KINDS, Memory
from autoshard.passes import LossFound, MaskFound, MixtureFound, ProductFound, module_path
from autoshard.planning import (
    ROWS,
    WAYS,
    WEIGHTS,
    contiguous_share,
    is_mixture,
    is_view,
    way_of,
)
from autoshard.runtime.agreement import compiled_across_hosts
from autoshard.runtime.collectives import (
    ONCE,
    TWICE,
    WHOLE,
    I,
    State,
    placement_words,
    reduce_add_norm,
)
from autoshard.runtime.graph_meta import ATTENTION_MASKS, CHUNKED, FLOAT8, MIXTURES
from autoshard.runtime.operators import rows_travel


def explain(
    built: Built,
    width: int | None = None,
    compiled: bool = True,
    optimizer: torch.optim.Optimizer | None = None,
) -> str:
    """A report for a terminal or a log file; repeated layers are one line with a count.

    width: columns; None: the terminal's, or 100 where standard output is none. compiled: False for
    the parts that need no backward graph: while a program is being compiled. optimizer: whose step
    is told too.
    """
    facts, columns = Facts(built), page_width(width)
    sections = [
        _headline(facts),
        built.chosen,
        _gap(built),
        _recomputed(built),
        _outer_plan(built),
        text_costs.dearest(facts, columns) if compiled else "",
        text_costs.by_module(facts, columns),
        _parameters(facts, columns),
        _unsharded(facts, columns),
        _masks(built, columns),
        _unbalanced(built),
        _mixtures(built, columns),
        _float8(built, columns),
        _losses(built, columns),
        "" if optimizer is None else text_costs.update(optimizer, columns),
    ]
    if compiled:
        sections += [
            _without_gradient(facts),
            text_costs.collectives(facts, columns),
            text_costs.fused(facts, columns),
            _inference_layers(built),
            _cuda_graph(built),
            compiled_across_hosts(),
            _regions(built),
        ]
    sections += [text_costs.beside(facts, columns), _memory(facts.memory) if compiled else ""]
    return "\n\n".join(section for section in sections if section) + "\n"


def _headline(facts: Facts) -> str:
    built, stored = facts.built, facts.parameters
    total = sum(group.bytes for group in stored)
    sharded = sum(group.bytes for group in stored if {*group.states.values()} != {I})
    axes = [axis for axis in built.mesh.axes if axis.size > 1] or [built.axis]
    share = 100 * sharded / total if total else 0.0
    # each a communicator: of the world, and of every axis that is not all of it
    held = f"{len(axes) + 1} groups" if len(axes) > 1 else "1 group"
    return (
        f"autoshard: {', '.join(f'{axis.name}={axis.size}' for axis in axes)}, "
        f"{len(built.parameters)} parameters, {human(total)} in all, "
        f"{share:.1f}% of the bytes sharded; rank in {held}"
    )


def _regions(built: Built) -> str:
    """How many pieces of code Inductor makes, and which layers are one."""
    compiled = built.config.inner == "inductor" and not built.config.cuda_graphs
    if not compiled or EQUAL_LAYERS in settings().left_out:
        return ""
    lines = []
    for phase, gm in (("forward", built.running.forward), ("backward", built.running.backward)):
        parts = parts_of(gm) if gm is not None else None
        if parts is None:
            continue
        counts = Counter(part.key for part in parts)
        shared = [part for part in parts if counts[part.key] > 1]
        layers = [name for name in dict.fromkeys(map(layer_of, shared)) if name]
        which = f" ({layers[0]} to {layers[-1]})" if layers else ""
        lines.append(
            f"{phase}: {len(counts)} regions for {len(parts)} parts; {len(shared)} parts share "
            f"{len({part.key for part in shared})}{which}"
        )
    return "\n  ".join(["equal layers are compiled once", *lines]) if lines else ""


def _gap(built: Built) -> str:
    gap = built.decisions.gap
    if not gap:
        return ""
    return (
        f"Not surely the cheapest plan: others may be {_milliseconds(gap)} cheaper at most "
        f"({gap / built.decisions.seconds:.1%}), as charged; to know would take too long"
    )


def _recomputed(built: Built) -> str:
    """What the plan computes again to fit, by operator, what it keeps on the host, the bytes that
    this spares and the time."""
    chosen = built.decisions.recomputation
    if chosen is None:
        return ""
    nodes = {node.name: node for node in built.serial.graph.nodes}
    found: Counter[str] = Counter()
    for text in chosen.again:
        node = nodes[text.partition(" ")[0]]
        if not is_view(node):
            found[folded(module_path(node)) or "outside of modules"] += 1
    places = sorted(found.items(), key=lambda item: (-item[1], item[0]))
    shown = ", ".join(f"{where} x {count}" for where, count in places[:6])
    more = f" and {len(places) - 6} places more" if len(places) > 6 else ""
    host = (
        f", and {len(chosen.sent)} wait on the host, {human(chosen.host)} that are "
        f"{_milliseconds(chosen.transfers)} on their way there and back"
        if chosen.sent
        else ""
    )
    return (
        f"computed again in backward: {sum(found.values())} values{host}, so that "
        f"{human(chosen.spared)} less is kept ({human(chosen.kept)} is), in "
        f"{_milliseconds(chosen.seconds)} a step; no choice in these segments keeps as little in "
        f"less than {_milliseconds(chosen.bound)}\n"
        f"  {shown}{more}"
    )


def _outer_plan(built: Built) -> str:
    """Which plan the axis has that was laid out before, under the budget."""
    outer = built.outer
    if outer is None or built.decisions.recomputation is None:
        return ""
    which = (
        "has a plan of dearer bytes"
        if outer.dearer
        else "has the plan that it has without a budget"
    )
    of = f", the quickest of {outer.tried} that were laid out" if outer.tried > 1 else ""
    return f"under the budget {outer.axis.name} {which}{of}"


def _cuda_graph(built: Built) -> str:
    if not built.config.cuda_graphs:
        return ""
    reason = not_captured(built)
    return f"not captured as a CUDA graph: {reason}" if reason else "captured as a CUDA graph"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _parameters(facts: Facts, width: int) -> str:
    rows = [
        [
            named(group.names),
            str(len(group.names)),
            group.shape,
            _placed(facts.built, group.states) + _GATHERED.get(group.choice, ""),
            human(group.bytes),
            group.because,
        ]
        for group in facts.parameters
    ]
    return table(["parameter", "count", "shape", "stored", "bytes", "because"], rows, width)


_GATHERED = {TWICE: ", gathered twice", ONCE: ", gathered once", WHOLE: ", whole on dp_shard"}


def _placed(built: Built, states: Mapping[str, State]) -> str:
    """Where a parameter is stored: `Shard(1)`; on several axes `Shard(0)@dp_shard, Shard(1)@tp`."""
    axes = [axis.name for axis in built.mesh.axes if axis.size > 1]
    if axes in ([], [built.axis.name]):
        return placement_words(states[built.axis.name])
    split = [f"{placement_words(states[name])}@{name}" for name in axes if states.get(name, I) != I]
    return ", ".join(split) or placement_words(I)


def _unsharded(facts: Facts, width: int) -> str:
    rows = [
        [each.kind, each.name, str(count), each.reason, each.where]
        for each, count in facts.whole.items()
    ]
    return table(["not sharded", "", "count", "because", "line"], rows, width) if rows else ""


def _masks(built: Built, width: int) -> str:
    """What the masks of attention were found to be; those that stay dense have no fused kernel on
    most GPUs."""
    found: Counter[MaskFound] = built.serial.meta.get(ATTENTION_MASKS, Counter())
    rows = [[one.meaning, str(n), one.reason, one.where] for one, n in found.items()]
    return table(["mask of attention", "count", "because", "line"], rows, width) if rows else ""


def _unbalanced(built: Built) -> str:
    """Causal attention by rows whose ranks hold contiguous parts of the sequence."""
    of, n = built.decisions, built.axis.size
    if built.outer is not None:
        of, n = built.outer.decisions, built.outer.axis.size
    reasons = Counter(line.partition(": ")[2] for line in of.unbalanced)
    return "\n".join(
        f"Causal attention in {count} places is unbalanced: the last of {n} ranks does "
        f"{contiguous_share(n):.2g} times the mean, since {why}"
        for why, count in reasons.items()
    )


_WAITS = "; the host waits for the counts of rows"


def _mixtures(built: Built, width: int) -> str:
    """How each mixture of experts is split; products of experts that are planned one by one."""
    ways = Counter(
        way_of(built.decisions.strategies[node]) or "whole on every rank"
        for node in built.serial.graph.nodes
        if is_mixture(node)
    )
    rows: list[list[str]] = []
    if built.mesh.axis("ep").size > 1:
        rows = _on_ep(built, sum(ways.values()))
        ways = ways if built.axis.size > 1 else Counter()
    found: Counter[MixtureFound] = built.serial.meta.get(MIXTURES, Counter())
    kinds = " and ".join(dict.fromkeys(one.what for one in found if one.what))
    rows += [
        [way, str(n), kinds + (_WAITS if way.startswith(WAYS[3]) else ""), ""]
        for way, n in ways.items()
    ]
    rows += [
        ["product by product", str(n), one.reason, one.where]
        for one, n in found.items()
        if one.reason
    ]
    header = ["mixture of experts", "count", "because", "line"]
    return table(header, rows, width) if rows else ""


def _on_ep(built: Built, mixtures: int) -> list[list[str]]:
    """What travels over ep for the mixtures, and what the planner charges either choice."""
    told: Counter[tuple[str, str]] = Counter()
    for node, seconds in built.decisions.on_ep.items():
        prices = ", ".join(f"{way} {1e3 * one:.3g} ms" for way, one in sorted(seconds.items()))
        told[built.decisions.strategies[node].on_ep, prices] += 1
    exchanged = sum(
        any(axis.name == "ep" for axis in rows_travel(node))
        for node in built.graph_module.graph.nodes
    )
    told[ROWS, ""] = exchanged - sum(n for (way, _), n in told.items() if way == ROWS)
    told[WEIGHTS, ""] = mixtures - sum(told.values())
    said = {ROWS: f"{WAYS[3]} on ep", WEIGHTS: "weights gathered on ep"}
    return [
        [said[way], str(n), f"charged: {prices}" * bool(prices) + _WAITS * (way == ROWS), ""]
        for (way, prices), n in told.items()
        if n > 0
    ]


def _float8(built: Built, width: int) -> str:
    """Products of activations and parameters: in float8, or left as they are, and why."""
    found: Counter[ProductFound] = built.serial.meta.get(FLOAT8, Counter())
    rows = [
        ["as it is" if one.reason else "in float8", str(n), one.reason, one.where]
        for one, n in found.items()
    ]
    header = ["product with a parameter", "count", "because", "line"]
    return table(header, rows, width) if rows else ""


def _losses(built: Built, width: int) -> str:
    """Cross entropies: by chunks of rows, or whole, and why."""
    found: Counter[LossFound] = built.graph_module.meta.get(CHUNKED, Counter())
    rows = [
        [
            "whole" if one.reason else f"by {one.rows:,} rows",
            human(one.bytes),
            human(one.spared) if one.spared > 0 else "",
            str(n),
            one.reason,
            one.where,
        ]
        for one, n in found.items()
    ]
    header = ["loss", "logits a rank", "spared", "count", "because", "line"]
    return table(header, rows, width) if rows else ""


def _inference_layers(built: Built) -> str:
    """The collectives that are one operator with what follows them, in a program for inference."""
    found = Counter(
        "reduce-scatter and gather" if node.kwargs.get("gather") else "all-reduce"
        for node in built.graph_module.graph.nodes
        if node.target is reduce_add_norm
    )
    parts = [f"{n} x a sum, the residual and a norm ({how})" for how, n in found.items()]
    return f"one operator each: {', '.join(parts)}" if parts else ""


def _without_gradient(facts: Facts) -> str:
    """Nothing in inference; in training the parameters that an optimizer would not move."""
    names = facts.built.without_gradient()
    if not facts.trains or not names:
        return ""
    groups = Counter(folded(name) for name in names)
    lines = [f"  {name}" + (f"  x {n}" if n > 1 else "") for name, n in groups.items()]
    return "\n".join(["trained, and no gradient in this graph:", *lines])


def _memory(memory: Memory) -> str:
    at = memory.peak_at
    rows = [
        [kind, human(getattr(memory, kind)), human(at.held[kind])]
        for kind in KINDS
        if getattr(memory, kind)
    ]
    where = f"peak, in {at.phase}" + (f" at {at.node}" if at.node else "")
    rows.append([where, "", human(memory.peak)])
    holds = "a rank holds (AdamW)" if memory.optimizer else "a rank holds"
    return table([holds, "at most", "at the peak"], rows)
