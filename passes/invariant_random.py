"""invariant_random: random numbers become a function of one seed a call and the element's position.

    before                                      after
    %x: f32[4,8]                                %x: f32[4,8]
    %0: f32[4,8] = dropout(%x, 0.1, True)       %0: i64[] = random_seed(cpu)
    %1: f32[4,8] = rand_like(%0)                %1: f32[4,8] = dropout(%x, %0, 0.1, 0)
                                                %2: f32[4,8] = uniform(%1, %0, 0.0, 1.0, 1, f32)

The seed is one draw from torch's generator a call of the graph; the last integer counts the random
operators of the graph, so that no two draw alike. The new operators shard along every dim and give
what the graph gives on one device (runtime/randomness/operators.py). Attention with dropout inside
is computed with its scores written out. A region that is computed again finds the same seed.

With `rng="tracker"` the seed is a pair from named states, `%0: i64[2] = tracked_seeds(cpu,
data-parallel, tensor-parallel)`, of which an operator on a shard takes the second.

Not done: an operator with a generator of its own; poisson, binomial and gamma numbers, which take
a loop each; dropout between the layers of a packed recurrent network. They draw from torch's
generator, alike on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from autoshard.passes.base import CARRIED, Context, Report
from autoshard.planning import same_shape
from autoshard.runtime import randomness

aten = torch.ops.aten
_ops = torch.ops.autoshard
_VERSION = randomness.VERSION

# An operator's arguments by name -> (the new operator, what stands before the seed, and after it up
# to the call number, and after that); a string instead says why it stays.
Arguments = dict[str, Any]
New = tuple[Any, tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]


def _dropout(a: Arguments, node: fx.Node) -> New | str:
    return _ops.dropout, (a["input"],), (a["p"],), ()


def _native_dropout(a: Arguments, node: fx.Node) -> New | str:
    return _ops.native_dropout, (a["input"],), (a["p"],), ()


def _feature_dropout(a: Arguments, node: fx.Node) -> New | str:
    return _ops.feature_dropout, (a["input"],), (a["p"],), ()


def _bernoulli(a: Arguments, node: fx.Node) -> New | str:
    return _ops.bernoulli, (a["input"],), (), ()


def _bernoulli_p(a: Arguments, node: fx.Node) -> New | str:
    return _ops.bernoulli_p, (a["input"],), (a["p"],), ()


def _uniform(a: Arguments, node: fx.Node) -> New | str:
    return _ops.uniform, (a["input"],), (a["from_"], a["to"]), ()


def _normal(a: Arguments, node: fx.Node) -> New | str:
    return _ops.normal, (a["input"],), (a["mean"], a["std"]), ()


def _exponential(a: Arguments, node: fx.Node) -> New | str:
    return _ops.exponential, (a["input"],), (a["lambd"],), ()


def _rand(a: Arguments, node: fx.Node) -> New | str:
    return _ops.uniform, (_shape(a, node),), (0.0, 1.0), (node.meta["val"].dtype,)


def _randn(a: Arguments, node: fx.Node) -> New | str:
    return _ops.normal, (_shape(a, node),), (0.0, 1.0), (node.meta["val"].dtype,)


def _attention(a: Arguments, node: fx.Node) -> New | str:
    query, result = a["query"].meta["val"], node.meta["val"]
    if not same_shape(query.select(-1, 0), result.select(-1, 0)):
        return f"queries of shape {tuple(query.shape)} are broadcast to {tuple(result.shape)}"
    tensors = (a["query"], a["key"], a["value"], a["attn_mask"])
    after = (a["dropout_p"], a["is_causal"], a["scale"], a["enable_gqa"])
    return _ops.attention, tensors, after, ()


def _rrelu(a: Arguments, node: fx.Node) -> New | str:
    return _ops.rrelu, (a["input"],), (a["lower"], a["upper"]), ()


def _cauchy(a: Arguments, node: fx.Node) -> New | str:
    return _ops.cauchy, (a["input"],), (a["median"], a["sigma"]), ()


def _geometric(a: Arguments, node: fx.Node) -> New | str:
    return _ops.geometric, (a["input"],), (a["p"],), ()


def _log_normal(a: Arguments, node: fx.Node) -> New | str:
    return _ops.log_normal, (a["input"],), (a["mean"], a["std"]), ()


def _normal_tensors(a: Arguments, node: fx.Node) -> New | str:
    mean, std = a["mean"], a["std"]
    if not isinstance(std, fx.Node):
        return _ops.normal_around, (mean,), (std,), ()
    if not isinstance(mean, fx.Node):
        return _ops.normal_scaled, (std,), (mean,), ()
    if not same_shape(mean.meta["val"], std.meta["val"]):
        return "mean and deviation have different shapes"
    return _ops.normal_each, (mean, std), (), ()


def _integers(a: Arguments, node: fx.Node) -> New | str:
    low, high = a.get("low", 0), a["high"]
    if not isinstance(low, int) or not isinstance(high, int):
        return "its limits are symbolic"
    return _ops.integers, (_shape(a, node),), (low, high), (node.meta["val"].dtype,)


def _permutation(a: Arguments, node: fx.Node) -> New | str:
    return _ops.permutation, (_shape({"size": [a["n"]]}, node),), (), (node.meta["val"].dtype,)


def _multinomial(a: Arguments, node: fx.Node) -> New | str:
    if not isinstance(a["num_samples"], int):
        return "the number of its samples is symbolic"
    return _ops.multinomial, (a["input"],), (a["num_samples"], a["replacement"]), ()


_REWRITES: dict[Any, Callable[[Arguments, fx.Node], New | str]] = {
    aten.dropout.default: _dropout,
    aten.native_dropout.default: _native_dropout,
    aten.feature_dropout.default: _feature_dropout,
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.p: _bernoulli_p,
    aten.uniform.default: _uniform,
    aten.normal_functional.default: _normal,
    aten.exponential.default: _exponential,
    aten.rand.default: _rand,
    aten.rand_like.default: _rand,
    aten.randn.default: _randn,
    aten.randn_like.default: _randn,
    aten.scaled_dot_product_attention.default: _attention,
    aten.rrelu.default: _rrelu,
    aten.cauchy.default: _cauchy,
    aten.geometric.default: _geometric,
    aten.log_normal.default: _log_normal,
    aten.normal.Tensor_float: _normal_tensors,
    aten.normal.float_Tensor: _normal_tensors,
    aten.normal.Tensor_Tensor: _normal_tensors,
    aten.randint.default: _integers,
    aten.randint.low: _integers,
    aten.randint_like.default: _integers,
    aten.randint_like.low_dtype: _integers,
    aten.randperm.default: _permutation,
    aten.multinomial.default: _multinomial,
}
_LIKE = (
    aten.rand_like.default,
    aten.randn_like.default,
    aten.randint_like.default,
    aten.randint_like.low_dtype,
)
_WHOLE_NUMBERS = (_integers, _permutation, _multinomial)


def _shape(a: Arguments, node: fx.Node) -> fx.Node:
    """A tensor with the shape of the result; its values are never read."""
    if node.target in _LIKE:
        return a["input"]  # type: ignore[no-any-return]
    val = node.meta["val"]
    options = {"dtype": val.dtype, "device": val.device}
    with node.graph.inserting_before(node):
        new = node.graph.call_function(aten.empty.memory_format, (a["size"],), options)
    new.meta = {key: node.meta[key] for key in (*CARRIED, "val", "diff") if key in node.meta}
    return new


@dataclass(frozen=True)
class InvariantRandom:
    """See the module's text."""

    name: ClassVar[str] = "invariant_random"

    def run(self, gm: fx.GraphModule, ctx: Context) -> Report:
        """Rewrite `gm.graph` in place."""
        report = Report(self.name)
        tracked = getattr(ctx.config, "rng", "invariant") == "tracker"
        seeds: dict[Any, fx.Node] = {}  # by the states they are drawn from
        on: torch.device | None = None
        for node in list(gm.graph.nodes):
            rewrite = _REWRITES.get(node.target) if node.op == "call_function" else None
            if rewrite is None:
                continue
            arguments = _arguments(node)
            if not _draws(arguments):
                continue
            device = _result(node).device
            if arguments.get("generator") is not None:
                report.skip(node, "it has a generator of its own")
            elif not _result(node).dtype.is_floating_point and rewrite not in _WHOLE_NUMBERS:
                report.skip(node, f"{_result(node).dtype} numbers")
            elif on is not None and device != on:
                report.skip(node, f"on {device}, the seed is on {on}")
            elif isinstance(found := rewrite(arguments, node), str):
                report.skip(node, found)
            else:
                on, states = device, _states(node) if tracked else ()
                if states not in seeds:
                    seeds[states] = self._seed(gm.graph, node, device, states)
                self._replace(gm.graph, node, seeds[states], found, report.hits)
                report.hits += 1
        return report

    def _seed(
        self, graph: fx.Graph, first: fx.Node, device: torch.device, states: tuple[str, ...]
    ) -> fx.Node:
        """The draw, before everything else and in no region that is computed again."""
        anchor = next(n for n in graph.nodes if n.op not in ("placeholder", "get_attr"))
        op = _ops.tracked_seeds if states else _ops.random_seed
        with graph.inserting_before(anchor):
            seed = graph.create_node(
                "call_function", op.default, (device, *states), name=op.__name__
            )
        shape = (2,) if states else ()
        with _fake_mode(first):
            seed.meta["val"] = torch.empty(shape, dtype=torch.int64, device=device)
        seed.meta["diff"] = False
        seed.meta["custom"] = {"autoshard_pass": self.name}
        if "stack_trace" in first.meta:
            seed.meta["stack_trace"] = first.meta["stack_trace"]
        return seed

    def _replace(
        self, graph: fx.Graph, node: fx.Node, seed: fx.Node, found: New, call: int
    ) -> None:
        packet, before, after, last = found
        arguments = (*before, seed, *after, call, *last)
        with graph.inserting_before(node):
            target = getattr(packet, _VERSION)
            new = graph.create_node("call_function", target, arguments, name=packet.__name__)
        new.meta = {key: node.meta[key] for key in (*CARRIED, "val", "diff") if key in node.meta}
        new.meta["custom"] = {**new.meta.get("custom", {}), "autoshard_pass": self.name}
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _states(node: fx.Node) -> tuple[str, str]:
    """The states a random operator draws from: on values that all ranks hold, and on shards.

    A block of `rng.fork` names one of the two; which one is used follows from the plan.
    """
    name = node.meta.get("custom", {}).get(randomness.RANDOM_STATE)
    if name in (randomness.DEFAULT, randomness.DATA):
        return name, randomness.TENSOR
    return randomness.DATA, name or randomness.TENSOR


def _arguments(node: fx.Node) -> Arguments:
    """The arguments by name, defaults filled in; a first tensor is always "input"."""
    schema = node.target._schema  # type: ignore[union-attr]
    found: Arguments = {}
    for i, declared in enumerate(schema.arguments):
        name = {"self": "input", "from": "from_"}.get(declared.name, declared.name)
        if i < len(node.args):
            found[name] = node.args[i]
        else:
            found[name] = node.kwargs.get(declared.name, declared.default_value)
    return found


def _draws(a: Arguments) -> bool:
    """Whether the call, as its arguments stand, draws random numbers."""
    if a.get("train", True) is False or a.get("training", True) is False:
        return False
    p = a.get("dropout_p", a.get("p") if "train" in a else None)
    return p != 0


def _result(node: fx.Node) -> torch.Tensor:
    val = node.meta["val"]
    found: torch.Tensor = val[0] if isinstance(val, (tuple, list)) else val
    return found


def _fake_mode(node: fx.Node) -> Any:
    return _result(node).fake_mode  # type: ignore[attr-defined]
