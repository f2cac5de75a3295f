"""with_cache: a graph of whole sequences becomes one that continues them.

    before                                          after
    %t: i64[b,s]                                    %t: i64[b,s]
    %0: i64[s] = arange(0, s, 1)                    %past: i32[b]
    %1: i64[1,s] = unsqueeze(%0, 0)                 %kc: f32[b,2,64,16]    %vc: f32[b,2,64,16]
    ...                                             %0: i64[b,s] = past + arange(0, s, 1)
    %5: f32[b,8,s,16] = attention(%q, %k, %v,       ...
        causal="upper_left", scale=0.25)            %3 = update_cache(%kc, %k, %past)
                                                    %4 = update_cache(%vc, %v, %past)
                                                    %5: f32[b,8,s,16] = attention(%q, %3, %4,
                                                        lengths=past + s, causal="lower_right",
                                                        scale=0.25)
                                                    return (..., %3, %4)

One graph serves the prompt (past = 0) and every later token, of rows of different lengths: a
shorter prompt is filled up behind its end, and the next token overwrites what was filled in.

That is right where attention alone looks from one token at others. Each operator that reads an
input is checked to compute a token from the same token (carrying.py), and what the position of a
token decides is looked up by its position (tables.py); every other graph is refused, with the line
of the operator that looks further.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from autoshard.export.errors import export_error
from autoshard.export.rank_graph.attention_forms import CachedMasks, Sight, is_expanded
from autoshard.export.rank_graph.cache.axes import PRIMES, Mixed, Place, Places, found_in, reads
from autoshard.export.rank_graph.cache.carrying import Carrier
from autoshard.export.rank_graph.cache.lookups import Lookups
from autoshard.export.rank_graph.cache.tables import Tables
from autoshard.export.rank_graph.operators import LOWER_RIGHT, NONE, attention, update_cache

aten = torch.ops.aten

LENGTHS = "past_lengths"


def with_cache(
    gm: fx.GraphModule,
    inputs: list[str],
    constants: dict[str, torch.Tensor],
    sizes: Mapping[str, str],
    sights: Mapping[fx.Node, Sight],
    max_length: int,
    mode: Any,
) -> dict[str, str]:
    """Rewrite `gm.graph` in place; the role of each new input, by its name, in order.

    inputs: targets of the caller's placeholders; the first has the tokens, [batch, sequence].
    constants: by placeholder; tables are added. sizes: the name of each symbol. sights: what the
    queries of each attention see, where it is known. max_length: tokens a cache holds. Raises
    ExportError for attention that is not causal over the sequence, and for any other operator that
    computes a token from others or from the length.
    """
    graph = gm.graph
    by_name = {str(n.target): n for n in graph.find_nodes(op="placeholder")}
    given = [by_name[name] for name in inputs]
    nodes = graph.find_nodes(op="call_function", target=attention)
    if not nodes:
        raise export_error(
            "the model has no attention, whose keys and values a cache holds; the state of a "
            "state-space model is in none",
            remedy="Export without a cache (no max_length), or a Hugging Face directory.",
        )
    if "sequence" not in sizes.values():
        raise export_error(
            "a key-value cache needs a sequence of any length, and this has one length only",
            remedy="Give dynamic={'sequence': (1, longest, longest)}.",
        )
    sequence = given[0].meta["val"].shape[1]
    # what is attended to whole, such as an encoder's keys, is in no cache
    (symbol,) = [symbol for symbol, name in sizes.items() if name == "sequence"]
    nodes = [node for node in nodes if reads(node.args[1], symbol)]  # type: ignore[arg-type]
    for node in nodes:
        _check(node, sights.get(node), sequence)
    tables = Tables(graph, constants, sizes, set(given), max_length)
    batch = _carried(tables, given)
    lengths, roles = _caches(graph, given[0], nodes, sights, constants, max_length, mode)
    try:
        Lookups(tables, batch, given[0], lengths).write()
    except Mixed as mixed:
        raise _refusal(mixed, None) from None
    return roles


def _check(node: fx.Node, sight: Sight | None, sequence: Any) -> None:
    query, key = (n.meta["val"] for n in node.args[:2])  # type: ignore[union-attr]
    if sight is None or not sight.causal:
        raise export_error(
            "a key-value cache needs attention that is causal (within a window, or with a bias of "
            "each key or of each distance to it), and this has another mask",
            node,
            "Export without a cache (no max_length).",
        )
    if str(query.shape[2]) != str(sequence) or str(key.shape[2]) != str(sequence):
        raise export_error(
            f"a key-value cache needs attention over the sequence, and this is over "
            f"{query.shape[2]} x {key.shape[2]} tokens",
            node,
        )


def _carried(tables: Tables, given: list[fx.Node]) -> Places:
    """The place of the batch in every value that an input decides, where it is known. Raises
    ExportError where a value at one token depends on other tokens."""
    symbols = {name: symbol for symbol, name in tables.sizes.items()}
    rows = given[0].meta["val"].shape[0]
    rows = PRIMES["batch"] if "batch" in symbols else int(rows)
    places: Places = {}
    batches: Places = {}
    for node in given:
        dims = dict(enumerate(tables.primes.shape(node)[:2]))
        places[node] = Place(1) if dims.get(1) == PRIMES["sequence"] else None
        batches[node] = Place(0) if dims.get(0) == rows else None

    def place(node: fx.Node) -> Place | None:
        return tables.place(node) if node in tables else places.get(node)

    def batch_of(node: fx.Node) -> Place | None:
        if node in tables and "batch" in symbols:
            return found_in(tables.primes.shape(node), rows)
        return batches.get(node)

    along = Carrier(tables.primes, PRIMES["sequence"], tables.sequence, place)
    across = Carrier(tables.primes, rows, symbols.get("batch"), batch_of)
    for node in tables.graph.nodes:
        if node.op == "output":
            _check_outputs(node, tables)
        if node.op != "call_function" or node not in tables.of_input:
            continue
        try:
            places[node] = along.result(node)
        except Mixed as mixed:
            raise _refusal(mixed, node) from None
        try:
            batches[node] = across.result(node)
        except Mixed:
            batches[node] = None  # the rows of a batch may meet: the cache keeps them in order
    return batches


def _check_outputs(output: fx.Node, tables: Tables) -> None:
    for i, node in enumerate(output.args[0]):  # type: ignore[arg-type]
        if node in tables:
            raise export_error(f"output {i} of the model is the length's alone", node)


def _refusal(mixed: Mixed, node: fx.Node | None) -> Exception:
    where = mixed.node or node
    remedy = "Export without a cache (no max_length)."
    given = [] if where is None else where.graph.find_nodes(op="placeholder")
    if any(getattr(n.meta.get("val"), "dtype", None) == torch.float16 for n in given):
        remedy = (
            "Export without a cache (no max_length), or with dtype='bfloat16' where the model does "
            "this in float16 alone, as T5 does against overflow."
        )
    return export_error(
        "a key-value cache needs every operator but attention to compute each token by itself, "
        f"and this {mixed}",
        where,
        remedy,
    )


def _caches(
    graph: fx.Graph,
    ids: fx.Node,
    nodes: list[fx.Node],
    sights: Mapping[fx.Node, Sight],
    constants: dict[str, torch.Tensor],
    max_length: int,
    mode: Any,
) -> tuple[fx.Node, dict[str, str]]:
    """Inputs and outputs for the keys and values of each attention; the input of the past lengths,
    and the role of each new one."""
    batch = ids.meta["val"].shape[0]

    def placeholder(name: str, shape: tuple[Any, ...], dtype: torch.dtype, after: fx.Node) -> Any:
        with graph.inserting_after(after):
            made = graph.placeholder(name)
        with mode:
            made.meta["val"] = torch.empty(shape, dtype=dtype)
        return made

    last = lengths = placeholder(LENGTHS, (batch,), torch.int32, ids)
    roles = {LENGTHS: "lengths"}
    caches = []
    for i, node in enumerate(nodes):
        pair = []
        for kind, operand in zip(("key", "value"), node.args[1:3]):
            _, heads, _, width = operand.meta["val"].shape  # type: ignore[union-attr]
            name = f"{kind}_cache_{i}"
            dtype = operand.meta["val"].dtype  # type: ignore[union-attr]
            last = placeholder(name, (batch, heads, max_length, width), dtype, last)
            roles[name] = f"{kind}_cache"
            pair.append(last)
        caches.append(pair)
    with graph.inserting_before(_first_call(graph)):
        size = graph.call_function(aten.sym_size.int, (ids, 1))
        total = graph.call_function(aten.add.Tensor, (lengths, size))
    masks = CachedMasks(graph, constants, lengths, size, max_length)
    results = []
    for node, pair in zip(nodes, caches):
        operands = []
        with graph.inserting_before(node):
            for cache, operand in zip(pair, node.args[1:3]):
                new = graph.call_function(update_cache, (cache, operand, lengths))
                new.meta = {k: v for k, v in node.meta.items() if k != "val"}
                operands.append(new)
        if sights[node].plain and not is_expanded(node):
            node.args = (node.args[0], *operands, None, total)
            node.kwargs = {**node.kwargs, "causal": LOWER_RIGHT}
        else:
            node.args = (node.args[0], *operands, masks.of(node, sights[node]))
            node.kwargs = {**node.kwargs, "causal": NONE}
        results += operands
    output = graph.output_node()
    output.args = ((*output.args[0], *results),)  # type: ignore[misc]
    return lengths, roles


def _first_call(graph: fx.Graph) -> fx.Node:
    return next(n for n in graph.nodes if n.op not in ("placeholder",))
