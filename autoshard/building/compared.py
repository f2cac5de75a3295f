"""What ranks must agree on, as lines of text: one list for every axis, and for an export.

Ranks of an axis that share a batch compare all of it. Data-parallel ranks, whose graphs may differ,
compare the job and the parameters, and of the graph what does not depend on a batch
(`data_ranks.py`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autoshard.compiling import settings
from autoshard.config import Config
from autoshard.planning import target_name, value

# Which device of its kind a rank uses, its place on an axis, and where an object lies, are its own
# affair.
_OF_THIS_PROCESS = re.compile(
    r":\d+(?=['\"])|(?: object)? at 0x[0-9a-f]+|, index=\d+|, rank=\d+, group='[^']*'"
)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Lines that must be the same on all ranks.

    job: of the environment, the machine, the options, and what was chosen within them.
    parameters: their names, shapes, dtypes and whether they are trained. nodes: of the serial
    graph. operators: their names alone. plan: where what is stored and split.
    """

    job: list[str]
    parameters: list[str]
    nodes: list[str]
    operators: list[str]
    plan: list[str]

    def lines(self) -> list[str]:
        """All of them; of what differs, the cause comes before what it leads to."""
        return [*self.job, *self.parameters, *self.nodes, *self.plan]


def compared(
    serial: fx.GraphModule,
    names: Mapping[fx.Node, str],
    tensors: Mapping[str, torch.Tensor],
    config: Config,
    machine: str,
    gradients: str,
    chosen: Sequence[str],
    plan: Sequence[str],
) -> Compared:
    """What ranks compare of a program.

    names: of the parameters of the serial graph. tensors: the parameters, by name. machine: for
    which the program is planned. gradients: what backward does with them (`unshard.MICROBATCH`).
    chosen: lines of what was chosen once for the job, as what a budget computes again.
    """
    wishes = settings().text()  # of the environment, which may differ between machines
    options = [f"gradients: {gradients}", *config.lines(), *chosen]
    return Compared(
        job=[wishes, f"hardware: {machine}", *options],
        parameters=lines_of(tensors),
        nodes=[_node_line(node, names) for node in serial.graph.nodes],
        operators=[f"{node.op} {target_name(node)}" for node in serial.graph.nodes],
        plan=list(plan),
    )


def lines_of(parameters: Mapping[str, torch.Tensor]) -> list[str]:
    """What ranks compare of parameters, by name."""
    return [
        f"parameter {name}: {tuple(one.shape)} {one.dtype}, requires_grad {one.requires_grad}"
        for name, one in parameters.items()
    ]


def digest_of(lines: Sequence[str]) -> str:
    """A hash of the lines."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def default_floats(node: fx.Node) -> dict[str, float]:
    """The floats that a node leaves to its operator: `eps` of a norm."""
    schema = getattr(node.target, "_schema", None)
    absent = () if schema is None else schema.arguments[len(node.args) :]
    return {
        a.name: a.default_value
        for a in absent
        if type(a.default_value) is float and a.name not in node.kwargs
    }


def _node_line(node: fx.Node, parameters: Mapping[fx.Node, str]) -> str:
    """A node of a serial graph with its constants, shape and dtype."""
    val = value(node)
    shape = f" {tuple(val.shape)} {val.dtype}" if isinstance(val, torch.Tensor) else ""
    given = f"{node.args}" if node.op == "call_function" else ""
    kwargs = {**node.kwargs, **default_floats(node)}
    given += "".join(f" {name}={each}" for name, each in kwargs.items())
    args = _OF_THIS_PROCESS.sub("", given)
    return f"{node.op} {parameters.get(node, node.name)}{args}{shape}"
