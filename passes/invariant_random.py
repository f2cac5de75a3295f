"""invariant_random: random numbers become a function of one seed a call and the element's position.

    before                                      after
    %x: f32[4,8]                                %x: f32[4,8]
    %0: f32[4,8] = dropout(%x, 0.1, True)       %0: i64[] = random_seed(cpu)
    %1: f32[4,8] = rand_like(%0)                %1: f32[4,8] = dropout(%x, %0, 0.1, 0)
                                                %2: f32[4,8] = uniform(%1, %0, 0.0, 1.0, 1, f32)

The seed is one draw from torch's generator a call of the graph; the last integer counts the random
operators of the graph, so that no two draw alike. The new operators shard along every dim and give
what the graph gives on one device (runtime/randomness/draws.py). Attention with dropout inside
is computed with its scores written out. A region that is computed again finds the same seed.

With `rng="tracker"` the seed is a pair from named states, `%0: i64[2] = tracked_seeds(cpu,
data-parallel, tensor-parallel)`, of which an operator on a shard takes the second.

Not done: an operator with a generator of its own; poisson, binomial and gamma numbers, which take
a loop each; dropout between the layers of a packed recurrent network. They draw from torch's
generator, alike on all ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from autoshard.passes.base import Context, Pass, Report, maker, replace, set_region
from autoshard.planning import arguments, same_shape
from autoshard.runtime import randomness
from autoshard.runtime.graph_meta import DIFF, PASS, RANDOM_STATE

aten = torch.ops.aten
_ops = torch.ops.autoshard
_VERSION = randomness.VERSION

Arguments = dict[str, Any]


def _broadcast(a: Arguments, node: fx.Node) -> str | None:
    query, result = a["query"].meta["val"], node.meta["val"]
    if not same_shape(query.select(-1, 0), result.select(-1, 0)):
        return f"queries of shape {tuple(query.shape)} are broadcast to {tuple(result.shape)}"
    return None


def _unlike(a: Arguments, node: fx.Node) -> str | None:
    if not same_shape(a["mean"].meta["val"], a["std"].meta["val"]):
        return "mean and deviation have different shapes"
    return None


def _symbolic_limits(a: Arguments, node: fx.Node) -> str | None:
    plain = isinstance(a.get("low", 0), int) and isinstance(a["high"], int)
    return None if plain else "its limits are symbolic"


def _symbolic_count(a: Arguments, node: fx.Node) -> str | None:
    plain = isinstance(a["num_samples"], int)
    return None if plain else "the number of its samples is symbolic"


class New(NamedTuple):
    """The operator of autoshard that replaces a random one: name(*tensors, seed, *constants, call).

    tensors, constants: names of the old arguments. A constant without a name stands for itself,
    a pair is a name and its default. like: the one tensor is a stranger of the result's shape, and
    the result's dtype comes last. whole: it draws whole numbers. declines: why it stays, if so.
    """

    name: str
    tensors: tuple[str, ...] = ("input",)
    constants: tuple[str | float | tuple[str, Any], ...] = ()
    like: bool = False
    whole: bool = False
    declines: Callable[[Arguments, fx.Node], str | None] | None = None


_UNIFORM = New("uniform", (), (0.0, 1.0), like=True)
_NORMAL = New("normal", (), (0.0, 1.0), like=True)
_INTEGERS = New(
    "integers", (), (("low", 0), "high"), like=True, whole=True, declines=_symbolic_limits
)
_ATTENTION = New(
    "attention",
    ("query", "key", "value", "attn_mask"),
    ("dropout_p", "is_causal", "scale", "enable_gqa"),
    declines=_broadcast,
)
_MULTINOMIAL = New(
    "multinomial", constants=("num_samples", "replacement"), whole=True, declines=_symbolic_count
)

_REWRITES: dict[Any, New] = {
    aten.dropout.default: New("dropout", constants=("p",)),
    aten.native_dropout.default: New("native_dropout", constants=("p",)),
    aten.feature_dropout.default: New("feature_dropout", constants=("p",)),
    aten.bernoulli.default: New("bernoulli"),
    aten.bernoulli.p: New("bernoulli_p", constants=("p",)),
    aten.uniform.default: New("uniform", constants=("from", "to")),
    aten.normal_functional.default: New("normal", constants=("mean", "std")),
    aten.exponential.default: New("exponential", constants=("lambd",)),
    aten.rand.default: _UNIFORM,
    aten.rand_like.default: _UNIFORM,
    aten.randn.default: _NORMAL,
    aten.randn_like.default: _NORMAL,
    aten.scaled_dot_product_attention.default: _ATTENTION,
    aten.rrelu.default: New("rrelu", constants=("lower", "upper")),
    aten.cauchy.default: New("cauchy", constants=("median", "sigma")),
    aten.geometric.default: New("geometric", constants=("p",)),
    aten.log_normal.default: New("log_normal", constants=("mean", "std")),
    aten.normal.Tensor_float: New("normal_around", ("mean",), ("std",)),
    aten.normal.float_Tensor: New("normal_scaled", ("std",), ("mean",)),
    aten.normal.Tensor_Tensor: New("normal_each", ("mean", "std"), declines=_unlike),
    aten.randint.default: _INTEGERS,
    aten.randint.low: _INTEGERS,
    aten.randint_like.default: _INTEGERS,
    aten.randint_like.low_dtype: _INTEGERS,
    aten.randperm.default: New("permutation", (), like=True, whole=True),
    aten.multinomial.default: _MULTINOMIAL,
}


@dataclass(frozen=True)
class InvariantRandom(Pass):
    """tracked: seeds are drawn from named states (`rng="tracker"`)."""

    tracked: bool = False

    def rewrite(self, gm: fx.GraphModule, ctx: Context, report: Report) -> None:
        seeds: dict[Any, fx.Node] = {}  # by the states they are drawn from
        on: torch.device | None = None
        for node in list(gm.graph.nodes):
            new = _REWRITES.get(node.target) if node.op == "call_function" else None
            if new is None:
                continue
            given = _arguments(node)
            if not _draws(given):
                continue
            device = _result(node).device
            if given.get("generator") is not None:
                report.skip(node, "it has a generator of its own")
            elif not _result(node).dtype.is_floating_point and not new.whole:
                report.skip(node, f"{_result(node).dtype} numbers")
            elif on is not None and device != on:
                report.skip(node, f"on {device}, the seed is on {on}")
            elif new.declines is not None and (reason := new.declines(given, node)):
                report.skip(node, reason)
            else:
                on, states = device, _states(node) if self.tracked else ()
                if states not in seeds:
                    seeds[states] = self._seed(gm.graph, node, device, states)
                self._replace(gm.graph, node, new, given, seeds[states], report.hits)
                report.hits += 1

    def _seed(
        self, graph: fx.Graph, first: fx.Node, device: torch.device, states: tuple[str, ...]
    ) -> fx.Node:
        """The draw, before everything else, in no module and in no region computed again."""
        anchor = next(n for n in graph.nodes if n.op not in ("placeholder", "get_attr"))
        op = _ops.tracked_seeds if states else _ops.random_seed
        with graph.inserting_before(anchor):
            make = maker(first, self.name, value="unknown", name=op.__name__)
            seed = make(op.default, device, *states)
        set_region(seed, None)
        seed.meta.pop("nn_module_stack", None)
        seed.meta["custom"] = {PASS: self.name}
        with _result(first).fake_mode:  # type: ignore[attr-defined]
            shape = (2,) if states else ()
            seed.meta["val"] = torch.empty(shape, dtype=torch.int64, device=device)
        seed.meta[DIFF] = False
        return seed

    def _replace(
        self, graph: fx.Graph, node: fx.Node, new: New, given: Arguments, seed: fx.Node, call: int
    ) -> None:
        tensors = [given[name] for name in new.tensors]
        with graph.inserting_before(node):
            if new.like:
                tensors.append(given["input"] if "input" in given else self._shape(node, given))
            dtype = (node.meta["val"].dtype,) if new.like else ()
            make = maker(node, self.name, value=node, name=new.name)
            constants = (_constant(each, given) for each in new.constants)
            operator = getattr(getattr(_ops, new.name), _VERSION)
            replace(node, make(operator, *tensors, seed, *constants, call, *dtype))

    def _shape(self, node: fx.Node, given: Arguments) -> fx.Node:
        """A tensor with the shape of the result; its values are never read."""
        size = given["size"] if "size" in given else [given["n"]]
        val = node.meta["val"]
        make = maker(node, "", value=node)
        return make(aten.empty.memory_format, size, dtype=val.dtype, device=val.device)


def _constant(said: str | float | tuple[str, Any], given: Arguments) -> Any:
    if isinstance(said, tuple):
        return given.get(*said)
    return given[said] if isinstance(said, str) else said


def _states(node: fx.Node) -> tuple[str, str]:
    """The states a random operator draws from: on values that all ranks hold, and on shards.

    A block of `rng.fork` names one of the two; which one is used follows from the plan.
    """
    name = node.meta.get("custom", {}).get(RANDOM_STATE)
    if name in (randomness.DEFAULT, randomness.DATA):
        return name, randomness.TENSOR
    return randomness.DATA, name or randomness.TENSOR


def _arguments(node: fx.Node) -> Arguments:
    """The arguments by name, defaults filled in; a first tensor is always "input"."""
    return {"input" if name == "self" else name: one for name, one in arguments(node).items()}


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
