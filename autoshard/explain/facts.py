"""Facts: all that the text and the page say of a program, each computed once, when it is asked."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoshard.compiling import Built, Collective, collectives_of
from autoshard.explain.alternatives import Alternative, alternatives
from autoshard.explain.costs import Cost, costs, folded, hidden, hidden_windows, seconds
from autoshard.explain.reasons import Whole, reason, whole
from autoshard.memory import Memory, Moment, Step, step_of, summary
from autoshard.passes import FuseCollectives, user_line
from autoshard.planning import cost, global_bytes, is_trained, operands, strategy_text, value
from autoshard.runtime.collectives import State
from autoshard.runtime.graph_meta import DIFF


def carries_data(built: Built) -> Callable[[fx.Node], bool]:
    """Which nodes carry what the model computes: those with a gradient, so that masks and
    positions are left out; in a graph without gradients all of floating point."""
    if is_trained(built.serial):
        return lambda node: node.op == "call_function" and bool(node.meta.get(DIFF))
    return lambda node: (
        node.op == "call_function"
        and any(
            isinstance(val, torch.Tensor) and val.is_floating_point()
            for val in pytree.tree_leaves(value(node))
        )
    )


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters of equal places in repeated layers, stored alike for the same reason.

    shape: of one, as "64x256". states: by mesh axis. bytes: of all together, on all ranks.
    line: `file:line` of the user's code that reads the first ("" where it is not known). choice:
    what dp_shard does with each, where that was chosen (`CHOICES`).
    """

    names: list[str]
    shape: str
    states: Mapping[str, State]
    because: str
    line: str
    bytes: int
    choice: str = ""


class Apart(NamedTuple):
    """A collective that is no operator with products, and why."""

    collective: Collective
    reason: str


@dataclass(frozen=True)
class Facts:
    """What there is to say of one program."""

    built: Built

    @cached_property
    def trains(self) -> bool:
        """Whether the graph has a backward; one that was called without gradients has none."""
        outputs = self.built.serial.graph.output_node().all_input_nodes
        return any(output.meta.get(DIFF) for output in outputs)

    @cached_property
    def collectives(self) -> list[Collective]:
        """Every collective of a step, in the order of issue."""
        return collectives_of(self.built)

    @cached_property
    def apart(self) -> list[Apart]:
        """Gathers and reduce-scatters that are not one operator with products, where such were
        asked for."""
        found = {one.node.name: one for one in self.collectives if not one.fused}
        skips = [
            skip
            for report in self.built.reports
            if report.name == FuseCollectives.name
            for skip in report.skips
        ]
        return [Apart(found[skip.node], skip.reason) for skip in skips if skip.node in found]

    @cached_property
    def windows(self) -> dict[fx.Node, float]:
        """Seconds of the matrix products between the start and the wait of each collective."""
        return hidden_windows(self.built)

    @cached_property
    def costs(self) -> list[Cost]:
        """Collectives in groups, the dearest first."""
        return costs(self.built, self.collectives, self.windows)

    @cached_property
    def operators(self) -> dict[fx.Node, str]:
        """The operators that multiply matrices, read a parameter or communicate, with their
        strategies as text."""
        built, found = self.built, {}
        flows = carries_data(built)
        for node in built.serial.graph.nodes:
            strategy = built.decisions.strategies.get(node)
            if strategy is None or not flows(node):
                continue
            reads = any(source in built.parameters for source in operands(node))
            if reads or strategy.traffic or cost.node_flops(node):
                found[node] = strategy_text(strategy)
        return found

    @cached_property
    def parameters(self) -> list[ParameterGroup]:
        """All parameters, in the order of the graph."""
        built = self.built
        groups: dict[tuple[str, ...], list[fx.Node]] = defaultdict(list)
        for node, name in built.parameters.items():
            shape = "x".join(str(extent) for extent in value(node).shape)
            states = [f"{axis} {state}" for axis, state in self.states(node).items()]
            states.append(built.decisions.weights.get(node, ""))
            groups[folded(name), shape, *states, reason(built, node)].append(node)
        return [
            ParameterGroup(
                names=[built.parameters[node] for node in nodes],
                shape=key[1],
                states=self.states(nodes[0]),
                because=key[-1],
                line=user_line(next(iter(nodes[0].users), nodes[0])),
                bytes=sum(global_bytes(node) for node in nodes),
                choice=built.decisions.weights.get(nodes[0], ""),
            )
            for key, nodes in groups.items()
        ]

    @cached_property
    def moved(self) -> dict[str, list[tuple[Collective, float, float]]]:
        """Collectives, with their seconds and what of these may be hidden, by the state change."""
        found = defaultdict(list)
        for one in self.collectives:
            took = seconds(self.built, one)
            found[one.change].append((one, took, hidden(self.built, one, self.windows)))
        return found

    def states(self, node: fx.Node) -> dict[str, State]:
        """Where a parameter is stored, by mesh axis; on an absent one it is I."""
        return {self.built.axis.name: self.built.decisions.stored[node], **self.built.data[node]}

    @cached_property
    def whole(self) -> Counter[Whole]:
        """What is not sharded, with how often; numbers of layers are left out of the names."""
        return Counter(
            replace(
                each, name=folded(each.name) if each.kind == "parameter" else each.name, module=""
            )
            for each in whole(self.built)
        )

    @cached_property
    def alternatives(self) -> list[Alternative]:
        """This plan beside plans with a name."""
        return alternatives(self.built)

    @cached_property
    def moments(self) -> list[Moment]:
        """What is alive while each operator of a step runs."""
        return list(self._step.moments())

    @cached_property
    def memory(self) -> Memory:
        """Bytes a rank holds in a step, with AdamW."""
        return summary(self._step)

    @cached_property
    def _step(self) -> Step:
        return step_of(self.built)
