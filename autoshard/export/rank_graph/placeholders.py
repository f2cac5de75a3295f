"""name_placeholders: each placeholder is named by what it stands for, and says what that is.

    before                                      after
    %l_self_modules_up_..._weight_: f32[4,8]    %weight_0: f32[4,8]        WEIGHT: up.weight, S(0)
    %l_ids_: i64[s0,s1]                         %ids: i64[s0,s1]           ROLE: input
    %s0: s0                                     %size_s0: s0
    %0: f32[] = constant(_tensor_constant0)     %constant_0: f32[]         HELD: its value

Tensors that the graph holds become placeholders too: an exporter asks one place for all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx, nn

from autoshard.export.errors import export_error
from autoshard.export.rank_graph.graph import RankWeight
from autoshard.export.spec import DIMS
from autoshard.passes import Context, Report
from autoshard.runtime import compat
from autoshard.runtime.collectives import State
from autoshard.runtime.graph_meta import HELD, ROLE, WEIGHT

InputOrigin = str | RankWeight | torch.Tensor | None
"""What a placeholder stands for: an input by its name, a parameter, a constant; a size is None."""


@dataclass(frozen=True)
class NamePlaceholders:
    """See the module's text. origins: of each placeholder, in order."""

    name: ClassVar[str] = "name_placeholders"
    optional: ClassVar[bool] = False

    origins: Sequence[InputOrigin]

    def run(self, gm: fx.GraphModule, ctx: Context) -> Report:
        """Rewrite `gm.graph` in place. Raises ExportError for what it holds besides tensors."""
        report, weights, constants = Report(self.name), 0, 0
        given = list(gm.graph.find_nodes(op="placeholder"))
        for node, origin in zip(given, self.origins, strict=True):
            if isinstance(origin, str):
                node.target, node.meta[ROLE] = origin, "input"
            elif isinstance(origin, RankWeight):
                node.target, node.meta[WEIGHT] = f"weight_{weights}", origin
                weights += 1
            elif origin is not None:
                node.target, node.meta[HELD] = f"constant_{constants}", origin
                constants += 1
            else:
                node.target = f"size_{node.name}"  # inputs tell it, and `tidy` drops it
            report.hits += 1
        last = given[-1]
        for node in gm.graph.find_nodes(op="get_attr"):
            value = getattr(gm, str(node.target))
            if not isinstance(value, torch.Tensor):
                raise export_error(f"is a {type(value).__name__}, not a tensor", node)
            with gm.graph.inserting_after(last):
                last = gm.graph.placeholder(f"constant_{constants}")
            last.meta = {**node.meta, HELD: value.detach().cpu()}
            node.replace_all_uses_with(last)
            gm.graph.erase_node(node)
            constants += 1
            report.hits += 1
        return report


def read_origins(
    nodes: Sequence[fx.Node],
    inputs: Sequence[compat.GraphInput],
    names: Mapping[int, str],
    arguments: Collection[int],
    values: Mapping[int, torch.Tensor],
    stored: Mapping[fx.Node, State],
) -> tuple[list[InputOrigin], dict[str, str]]:
    """What the placeholders `nodes` of a planned graph stand for, and the name of each symbol;
    `inputs` are Dynamo's.

    By the id of a tensor: names of the parameters; arguments, those of the call; values, the
    user's tensor where the traced one is a copy without memory. stored: of each parameter.
    """
    origins: list[InputOrigin] = []
    sizes: dict[str, str] = {}
    for node, item in zip(nodes, inputs, strict=True):
        origin: InputOrigin = None
        if isinstance(item.real, nn.Parameter):
            val, name = node.meta["val"], names.get(id(item.real), item.name)
            origin = RankWeight(name, tuple(val.shape), stored[node], val.dtype)
        elif item.real is not None and id(item.real) not in arguments:
            value = values.get(id(item.real), item.real)
            origin = value.detach().to("cpu", item.real.dtype)
        elif item.real is not None:
            origin = item.key
            for dim, extent in zip(DIMS, item.fake.shape):
                if not isinstance(extent, int):
                    sizes.setdefault(str(extent), dim)
        origins.append(origin)
    return origins, sizes
