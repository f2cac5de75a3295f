"""A refusal: data parallelism stores parameters as shards, which a graph may not write to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from autoshard.errors import CaptureError, message
from autoshard.runtime.errors import source_line
from autoshard.runtime.graph_meta import MUTATED, N_OUTPUTS


def refuse_mutated(serial: fx.GraphModule, parameters: Mapping[fx.Node, str]) -> None:
    """A parameter written in forward would be written whole into its data-parallel shard."""
    placeholders = [n for n in serial.graph.nodes if n.op == "placeholder"]
    results: Any = serial.graph.output_node().args[0]
    for i, new in zip(serial.meta.get(MUTATED, ()), results[serial.meta[N_OUTPUTS] :]):
        if placeholders[i] not in parameters:
            continue
        name, what = parameters[placeholders[i]], "writes to its parameter"
        remedy = (
            "Write to it outside the compiled call (a method: call that of the model which was "
            "given to torch.compile), or make it a buffer."
        )
        if new.target is torch.ops.aten.embedding_renorm.default:
            what = "renormalises (max_norm) the rows it looks up of"
            remedy = (
                "Make the embedding without max_norm, and bound its rows after each step: "
                "weight.data.renorm_(2, 0, max_norm)."
            )
        raise CaptureError(
            message(
                f"the model {what} {name} in forward, and data parallelism stores parameters as "
                "shards, each rank of which sees its own batch; precision, in another dtype",
                where=source_line(new.meta.get("stack_trace")),
                remedy=remedy,
            )
        )
