"""chunk_loss: logits and their cross entropy become one operator that goes by chunks of rows.

    before                                        after
    %x: f32[2,6,8]                                %x: f32[2,6,8]
    %w: f32[4,8]                                  %w: f32[4,8]
    %y: i64[12]                                   %y: i64[12]
    %0: f32[2,6,4] = linear(%x, %w)               %0: f32[] = chunked_cross_entropy(%x, %w, None,
    %1: f32[12,4] = reshape(%0, [-1, 4])              %y)
    %2: f32[] = cross_entropy_loss(%1, %y)

Runs on the local graph, after all that changes losses. The logits of a rank, their copies and their
gradient, which are the largest values of most models, are then never whole. Between the product and
the loss there may be casts, a softcap, scales, a cut of a padded vocabulary, views and cut rows.

Not done: logits that something else reads (a returned copy aside), losses of each token
(reduction="none"), logits that the plan gathers or splits anew; other functions of logits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from autoshard.passes.base import Context, Pass, Report, maker, user_line
from autoshard.planning import serial_name, tensor_bytes
from autoshard.planning.chunked_loss import (
    NAMES,
    Head,
    LeftWhole,
    LossPlan,
    arguments_of,
    head_of,
    is_loss,
)
from autoshard.runtime import compat
from autoshard.runtime.collectives import I, chunk_size
from autoshard.runtime.graph_meta import (
    CHUNKED,
    N_OUTPUTS,
    OUTPUT_STATES,
    WITHHELD,
)
from autoshard.runtime.operators import as_text, chunked_cross_entropy, rows_a_chunk

aten = torch.ops.aten


class LossFound(NamedTuple):
    """A cross entropy: by chunks of so many rows, or whole, and why. bytes: of a rank's logits.
    spared: bytes that a step needs less, as planned."""

    rows: int
    bytes: int
    spared: int
    reason: str
    where: str


@dataclass(frozen=True)
class ChunkLoss(Pass, optional=True):
    """planned: by the name of each loss in the planned graph, whether it goes by chunks, or why
    not; those without an entry stay."""

    planned: Mapping[str, LossPlan]

    @staticmethod
    def of(losses: Mapping[fx.Node, LossPlan]) -> list[ChunkLoss]:
        """The pass for what was planned, if there is any."""
        planned = {node.name: one for node, one in losses.items()}
        return [ChunkLoss(planned)] if planned else []

    def rewrite(self, gm: fx.GraphModule, ctx: Context, report: Report) -> None:
        found = Counter[LossFound]()
        for node in [n for n in gm.graph.nodes if is_loss(n)]:
            plan = self.planned.get(serial_name(node) or node.name)
            if plan is None:
                continue
            rows, reason = 0, plan.reason
            if not reason:
                try:
                    rows = self._chunk(gm, node)
                    report.hits += 1
                except LeftWhole as left:
                    reason = str(left)
            if reason:
                report.skip(node, reason)
            spared = plan.balance.gain if plan.balance is not None else 0
            found[LossFound(rows, plan.nbytes, spared, reason, user_line(node))] += 1
        if found:
            gm.meta[CHUNKED] = found

    def _chunk(self, gm: fx.GraphModule, node: fx.Node) -> int:
        """Replace a loss, and say how many rows a chunk has."""
        given, head = arguments_of(node), head_of(node)
        returned, copies = self._returned(gm, head, node), head.copies
        val = given["self"].meta["val"]
        classes, axis = given.get("classes"), given.get("axis")
        over = [given[name] for name in ("axis", "outer") if name in given]
        if classes is None:
            classes, axis = val.shape[1], None
        else:
            over = over[1:]
        options = {
            "functions": as_text(head.functions),
            "dtype": val.dtype,
            "classes": classes,
            **({"axis": axis} if axis is not None else {}),
            **({"over": tuple(over)} if over else {}),
        }
        with gm.graph.inserting_before(node):
            hidden, weight, bias = self._operands(head)
            rest = (given[name] for name in NAMES[1:])
            make = maker(node, self.name, value=node)
            new = make(chunked_cross_entropy, hidden, weight, bias, *rest, **options)
        node.replace_all_uses_with(new)
        _withhold(gm, returned)
        for one in (node, *copies, *head.chain):
            gm.graph.erase_node(one)
        rows = tensor_bytes(val) // (val.shape[1] * val.dtype.itemsize)  # which may be a symbol
        most = chunk_size(classes, 1 if axis is None else axis.size)
        return rows_a_chunk(rows, most, hidden.meta["val"].shape[-1])

    def _operands(self, head: Head) -> tuple[fx.Node, fx.Node, fx.Node | None]:
        """Hidden states of the rows that count, weight [classes, width] and bias."""
        product = head.chain[-1]
        hidden, weight, bias = head.operands
        for cut in reversed(head.cuts):
            hidden = maker(cut, self.name)(aten.slice.Tensor, hidden, *cut.args[1:])
        if product.target is not aten.linear.default:
            weight = maker(product, self.name, value="unknown")(aten.t.default, weight)
        return hidden, weight, bias

    def _returned(self, gm: fx.GraphModule, head: Head, node: fx.Node) -> list[int]:
        """The results that are logits; raises where they, or another reader, need them whole."""
        output = gm.graph.output_node()
        for user in head.readers(node):
            if user is not output:
                raise LeftWhole(f"{user.name} reads its logits too")
        results: Any = output.args[0]
        returned = [i for i, one in enumerate(results) if one in (*head.chain, *head.copies)]
        if not returned:
            return []
        given = compat.symbol_places(n.meta["val"] for n in gm.graph.find_nodes(op="placeholder"))
        for size in [n for i in returned for n in results[i].meta["val"].shape]:
            if not isinstance(size, int) and not compat.size_symbols(size) <= given.keys():
                raise LeftWhole(
                    f"the model returns its logits, a size of which ({size}) depends on values "
                    "of its inputs"
                )
        if max(returned) >= gm.meta[N_OUTPUTS]:
            raise LeftWhole("its logits are written to an input")
        return returned


def _withhold(gm: fx.GraphModule, positions: list[int]) -> None:
    if not positions:
        return
    output = gm.graph.output_node()
    results, states = list(output.args[0]), list(gm.meta[OUTPUT_STATES])  # type: ignore[arg-type]
    for i in positions:
        results[i], states[i] = None, I
    output.args = (tuple(results),)
    gm.meta[OUTPUT_STATES] = states
    gm.meta[WITHHELD] = (*gm.meta.get(WITHHELD, ()), *positions)
