"""keep_last_tokens: behind the last attention, only the last token of each row is computed.

    before                                          after
    %9: f32[b,s,64] = add(%x, %attended)            %last_tokens: i32[b]
    ... norms, MLP ...                              %9: f32[b,s,64] = add(%x, %attended)
    %12: f32[b,s,257] = linear(%11, %head)          %10: f32[b,1,64] = gather(%9, 1, %last_tokens)
                                                    ... norms, MLP ...
                                                    %12: f32[b,1,257] = linear(%11, %head)

A prompt of 1024 tokens and a vocabulary of 128k would have logits of 512 MB in float32, of which a
server reads one row. `last_tokens` is the place in the call of each row's last token: rows of a
prompt are filled up to one length behind their end.

The cut is made as early as one value has all that the logits read of the tokens. That each operator
behind it computes a token by itself is what carrying.py has shown.
"""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoshard.export.rank_graph.evaluation import depends, reads
from autoshard.export.rank_graph.graph import CACHES, add_input, call_like, inputs_of
from autoshard.export.rank_graph.operators import attention, update_cache
from autoshard.export.rank_graph.tidy import propagate
from autoshard.passes import Context, Pass, Report
from autoshard.runtime.graph_meta import ROLE

aten = torch.ops.aten

LAST = "last_tokens"


@dataclass(frozen=True)
class KeepLastTokens(Pass, optional=True):
    """See the module's text. sequence: the symbol of the number of tokens.

    Not done: with more than one output, or no one value of [batch, tokens, ...] that it is computed
    from.
    """

    sequence: str

    def rewrite(self, gm: fx.GraphModule, ctx: Context, report: Report) -> None:
        graph = gm.graph
        results: Any = graph.output_node().args[0]
        outputs = len(results) - len(inputs_of(graph, *CACHES))
        if outputs != 1:
            report.skip(graph.output_node(), f"the model has {outputs} outputs, not one")
            return
        (given,) = inputs_of(graph, "lengths")
        (batch,) = given.meta["val"].shape
        found = _narrowest(graph, results[0], str(batch), self.sequence)
        if found is None:
            report.skip(results[0], "no one value of the tokens is all that it is computed from")
            return
        source, behind = found
        val = source.meta["val"]
        last = add_input(given, LAST, (batch,), torch.int32, **{ROLE: LAST})
        with graph.inserting_before(source.next):
            index = graph.call_function(aten._to_copy.default, (last,), {"dtype": torch.int64})
            for dim in range(1, val.dim()):
                index = graph.call_function(aten.unsqueeze.default, (index, dim))
            index = graph.call_function(aten.expand.default, (index, [-1, 1, *val.shape[2:]]))
            cut = call_like(source, aten.gather.default, source, 1, index)
        _rewrite(graph, behind, source, cut, self.sequence)
        propagate(graph)
        report.hits += 1


def _narrowest(
    graph: fx.Graph, logits: fx.Node, batch: str, sequence: str
) -> tuple[fx.Node, set[fx.Node]] | None:
    """The first node of [batch, tokens, ...] that is all the logits read of the tokens, and the
    nodes from it to the logits."""
    needed, passed = {logits}, set[fx.Node]()
    best: tuple[fx.Node, set[fx.Node]] | None = None
    for node in reversed(graph.nodes):
        if node not in needed:
            continue
        shape = [str(size) for size in node.meta["val"].shape]
        alone = [dim for dim, size in enumerate(node.meta["val"].shape) if depends(size, sequence)]
        if needed == {node} and alone == [1] and shape[:2] == [batch, sequence]:
            best = node, set(passed)
        inside = all(user in passed or user.op == "output" for user in node.users)
        if node.target in (attention, update_cache) or node.op == "placeholder" or not inside:
            break
        needed.discard(node)
        passed.add(node)
        needed |= {
            other
            for other in node.all_input_nodes
            if isinstance(other.meta.get("val"), torch.Tensor) and reads(other, sequence)
        }
    return best


def _rewrite(
    graph: fx.Graph, behind: set[fx.Node], source: fx.Node, cut: fx.Node, sequence: str
) -> None:
    """`behind` reads `cut` in the place of `source`, and one token in the place of their number."""

    def size(node: fx.Node) -> Any:
        if str(node.meta["val"]) == sequence:
            return 1
        args = tuple(put(arg) for arg in node.args)
        if not any(isinstance(arg, fx.Node) for arg in args):
            return node.target(*args)  # type: ignore[operator]
        if node.target is operator.mul and 1 in args:
            return args[1 - args.index(1)]
        return call_like(node, node.target, *args)

    def put(arg: Any) -> Any:
        if arg is source:
            return cut
        if isinstance(arg, fx.Node) and not isinstance(arg.meta.get("val"), torch.Tensor):
            return size(arg) if arg.op == "call_function" and reads(arg, sequence) else arg
        return arg

    for node in [n for n in graph.nodes if n in behind]:
        with graph.inserting_before(node):
            node.args = fx.node.map_arg(node.args, put)
            node.kwargs = fx.node.map_arg(node.kwargs, put)
        node.meta.pop("val", None)
    if not behind:
        output = graph.output_node()
        rest: Any = output.args[0]
        output.args = ((cut, *rest[1:]),)
