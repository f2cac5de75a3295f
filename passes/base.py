"""The contract of passes: a frozen dataclass, a context, a report, and one way to make nodes.

A pass rewrites a graph in place and reports; it never lints, recompiles or logs, which is the
runner's part (pipeline.py).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy

from autoshard.planning import Recomputation
from autoshard.runtime.collectives import Axis, State, chunk_bounds, shard_dim
from autoshard.runtime.errors import source_line
from autoshard.runtime.graph_meta import DIFF, HOST, PASS, VALUE

CARRIED = ("stack_trace", "nn_module_stack", "custom", "recompute", "ac_graph_id")
"""Metadata a new node takes over from the node it is made for."""

_REGION = ("recompute", "ac_graph_id")

# Above the number of every region of activation checkpointing: `cleanup_recompute_tags` of torch's
# partitioner saves a value whose reader is in a later region, and gathers must not be saved.
_LAST_REGION = 1 << 30


@dataclass(frozen=True)
class Context:
    """The context of a pass besides its graph: the planned axis, with this rank's place on it."""

    axis: Axis


class Skip(NamedTuple):
    """A place where a pass declined: the node's name and why, with the numbers."""

    node: str
    reason: str


@dataclass
class Report:
    """The result of a pass: `hits` rewrites, and the places where it declined."""

    name: str
    hits: int = 0
    skips: list[Skip] = field(default_factory=list)

    def skip(self, node: fx.Node, reason: str) -> None:
        """Record that the pass declined at `node`."""
        self.skips.append(Skip(node.name, reason))

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.hits} rewritten, {len(self.skips)} declined"]
        return "\n".join(lines + [f"  {skip.node}: {skip.reason}" for skip in self.skips])


class Pass:
    """A graph rewrite. Each is a frozen dataclass; its fields are its options.

    name: the class's, in lower case. optional: a program without the pass is as right, only slower.
    """

    name: ClassVar[str]
    optional: ClassVar[bool]

    def __init_subclass__(cls, optional: bool = False) -> None:
        cls.optional = optional
        cls.name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    def run(self, gm: fx.GraphModule, ctx: Context) -> Report:
        """Rewrite `gm.graph` in place."""
        report = Report(self.name)
        self.rewrite(gm, ctx, report)
        return report

    def rewrite(self, gm: fx.GraphModule, ctx: Context, report: Report) -> None:
        """What `run` does, told to `report`."""
        raise NotImplementedError


class Watch:
    """Follows the passes over the graphs of one program, and says which run; this one is silent.

    The runner calls it; autoshard.compiling.debugging has the one that obeys the environment.
    """

    def runs(self, name: str) -> bool:
        """Whether the pass is to run."""
        return True

    def key(self) -> str:
        """Text of the watch's changes to programs, for the key of a cache of compiled graphs."""
        return ""

    def before(self, name: str, gm: fx.GraphModule, phase: str = "") -> None:
        """Called before a pass. phase: "forward" or "backward", after autograd."""

    def after(self, name: str, gm: fx.GraphModule, report: Report, phase: str = "") -> None:
        """Called after a pass, with the graph it left."""


SILENT = Watch()


def emit(
    graph: fx.Graph,
    like: fx.Node,
    target: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    provenance: str,
    value: fx.Node | Literal["computed", "unknown"] = "computed",
    custom: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> fx.Node:
    """A new call_function node at the graph's insertion point, made on behalf of `like`.

    The metadata is that of `like`, with the entries of `custom`, which AOTAutograd carries into
    the forward and the backward graph; there, `PASS` says which pass made the node. provenance:
    that pass; "" keeps the one that made `like`. value: "computed" from the operands' fakes; that
    of another node, where running the operator would communicate or draw; or left to the caller.
    """
    node = graph.create_node("call_function", target, tuple(args), dict(kwargs or {}), name=name)
    node.meta = {key: like.meta[key] for key in CARRIED if key in like.meta}
    node.meta["custom"] = {**like.meta.get("custom", {}), **(custom or {})}
    node.meta["custom"].pop(VALUE, None)
    if provenance:
        node.meta["custom"][PASS] = provenance
    if isinstance(value, fx.Node):
        node.meta.update({key: value.meta[key] for key in ("val", DIFF) if key in value.meta})
    elif value == "computed":
        set_value(node)
    return node


def maker(like: fx.Node, provenance: str, **more: Any) -> Callable[..., fx.Node]:
    """Emits an operator with its arguments in the graph of `like`, on its behalf. more: as of
    `emit`."""

    def make(target: Callable[..., Any], /, *args: Any, **kwargs: Any) -> fx.Node:
        return emit(like.graph, like, target, args, kwargs, provenance=provenance, **more)

    return make


def replace(node: fx.Node, new: fx.Node) -> None:
    """Let everybody read `new` instead of a node, which goes."""
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def set_region(node: fx.Node, like: fx.Node | None) -> None:
    """Put a node into the region of activation checkpointing that `like` is in; None: into none."""
    for key in _REGION:
        node.meta.pop(key, None)
        if like is not None and key in like.meta:
            node.meta[key] = like.meta[key]


def set_recomputed(node: fx.Node, again: bool, planned: bool = False) -> None:
    """Have backward run a gather again, or keep its result, whatever region its readers are in.

    planned: of any operator, which the plan of what is recomputed names.
    """
    policy = CheckpointPolicy.MUST_RECOMPUTE if again else CheckpointPolicy.MUST_SAVE
    node.meta.update(dict(zip(_REGION, (policy, _LAST_REGION - planned))))


def set_fate(node: fx.Node, chosen: Recomputation) -> None:
    """Tag a node that makes a value of the plan (`VALUE`) as kept, on the device or on the host, or
    as computed again, in the local graph or in AOTAutograd's; the user's own regions stay as they
    are."""
    custom = node.meta.get("custom", {})
    name = custom.get(VALUE)
    if name is not None and "recompute" not in node.meta:
        if name in chosen.again or name in chosen.saved or name in chosen.sent:
            set_recomputed(node, name in chosen.again, planned=True)
        if name in chosen.sent:
            node.meta["custom"] = {**custom, HOST: True}


def set_value(node: fx.Node) -> None:
    """Compute `val` and `DIFF` of a node from those of its operands."""
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
    target: Any = node.target
    with torch.no_grad():
        with _fake_mode(args, kwargs) or nullcontext():
            val = target(*args, **kwargs)
    node.meta["val"] = val
    tensors = [t for t in pytree.tree_leaves(val) if isinstance(t, torch.Tensor)]
    if tensors:
        node.meta[DIFF] = any(n.meta.get(DIFF) for n in node.all_input_nodes) and any(
            t.dtype.is_floating_point or t.dtype.is_complex for t in tensors
        )


def _fake_mode(args: Any, kwargs: Any) -> Any:
    for leaf in pytree.arg_tree_leaves(*args, **kwargs):
        if isinstance(leaf, torch.Tensor):
            return getattr(leaf, "fake_mode", None)
    return None


def local_value(val: torch.Tensor, state: State, axis: Axis) -> torch.Tensor:
    """A fake of the local shape of `val` in `state`, under the same fake mode."""
    dim = shard_dim(state)
    if dim is None:
        return val
    extent = val.shape[dim]
    if isinstance(extent, int):
        length: int | torch.SymInt = chunk_bounds(extent, axis)[1]
    else:
        length = extent // axis.size
    shape = [*val.shape[:dim], length, *val.shape[dim + 1 :]]
    local = val.detach().new_empty(shape)
    return local.requires_grad_(val.requires_grad)


def user_line(node: fx.Node) -> str:
    """`file:line` of the user's code that made the node; "" where it is not known."""
    return source_line(node.meta.get("stack_trace")) or ""


def module_path(node: fx.Node) -> str:
    """Dotted path of the innermost module that made the node; "" outside of any.

    Dynamo names modules by how they are reached (`L['self']._modules['layers']...`); the path is
    that of `named_modules()`.
    """
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = list(stack.values())[-1][0]
    path = path.replace("L['args'][0]", "L", 1)  # the module of a forward that a decorator wraps
    for spelling in ("._modules[", "["):
        path = path.replace(spelling, ".")
    path = path.replace("]", "").replace("'", "").replace('"', "")
    parts = [part for part in path.split(".") if part]
    while parts and parts[0] in ("L", "G", "self", "fn", "_orig_mod"):
        parts = parts[1:]
    return ".".join(parts)
