"""AOTAutograd: private parts of torch that make a forward and a backward graph of one graph."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import fx, nn
from torch._decomp import decompositions
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.symbolic_convert import TensorifyState
from torch.fx._lazy_graph_module import _LazyGraphModule

T = TypeVar("T")

Finish = Callable[[fx.GraphModule, bool], Any]
"""Called with each graph AOTAutograd makes, and whether it is the backward, to rewrite it."""

AfterCut = Callable[[fx.GraphModule, fx.GraphModule, int], Any]
"""Called with a forward and a backward as soon as they are cut, to rewrite both together, and the
number of results in front of what is kept for backward."""

CutGraph = Callable[[fx.GraphModule, Mapping[fx.Node, Any]], Sequence[Any] | None]
"""The parts of a graph (`autoshard.compiling.regions.GraphPart`), or None where it is better whole;
what a compiler must know of an input besides its metadata is part of what makes two equal."""

Doing = Callable[[str], contextlib.AbstractContextManager[Any]]
"""Around a piece of work, which it names to who waits."""


Graphs = Sequence[fx.GraphModule]
"""A forward and a backward."""


class Unequal(Exception):
    """Of a `Short` graph: its joint graph does not say what that of the long one is."""


@dataclass(frozen=True)
class Short:
    """A graph that is traced in the place of a longer one. grow: makes of its joint graph, in
    place, that of the longer one; or of what a function cuts of its joint graph what it would cut
    of the longer one's; or raises `Unequal`. key: what the two differ by, for caches."""

    module: fx.GraphModule
    grow: Callable[..., Graphs]
    key: str

    def cut(self, joint: fx.GraphModule, cut: Callable[[fx.GraphModule], Graphs]) -> Graphs:
        """The graphs that `cut` makes of the longer graph's joint one: made of the short one, where
        nothing is shared out among layers."""
        with contextlib.suppress(Unequal):
            if torch._functorch.config.activation_memory_budget == 1:
                return self.grow(joint.graph, lambda: cut(_copied(joint)))
        self.grow(joint.graph)
        return cut(joint)


def without_code(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A module of a graph whose code is written when it is first run or printed: most that a search
    plans never are, and GraphModule writes and compiles it each time a graph is set."""
    return _LazyGraphModule(root, graph)


def taking_a_list(gm: fx.GraphModule) -> Any:
    """What to give AOTAutograd in the place of a graph, so that the compiled function takes a list,
    which it clears: each input is freed after its last use, if nobody else has it."""
    from torch._dynamo.utils import GmWrapper  # by which torch's compiled autograd does the same

    return GmWrapper(gm, tuple)


def _train_recurrent_layers() -> None:
    """Have an LSTM of which something is trained be traced in steps.

    torch 2.13 asks only whether the first layer's input needs a gradient: where it does not
    (features, a frozen embedding), all layers become oneDNN's kernel for inference, which saves
    nothing for the backward of their weights.
    """
    usual = decompositions.select_one_layer_lstm_function

    def one_layer(input: Any, hx: Any, params: Any) -> Any:
        given = itertools.chain(hx, *params)
        trained = torch.is_grad_enabled() and any(one.requires_grad for one in given)
        return decompositions.one_layer_lstm if trained else usual(input, hx, params)

    decompositions.select_one_layer_lstm_function = one_layer


_train_recurrent_layers()


def aot_eager(
    gm: fx.GraphModule,
    fakes: Sequence[Any],
    cut: AfterCut,
    finish: Finish | None = None,
    takes_list: bool = False,
    short: Short | None = None,
) -> Callable[..., Any]:
    """AOTAutograd's forward and backward graphs, run operator by operator.

    takes_list: see `taking_a_list`. short: is traced in the place of `gm`.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    given = gm if short is None else short.module

    def compiler(backward: bool) -> Callable[..., Any]:
        def compile_graph(graph: fx.GraphModule, inputs: Any) -> Any:
            if finish is not None:
                finish(graph, backward)
            return boxed_nop(graph, inputs)

        return compile_graph

    return aot_autograd(
        fw_compiler=compiler(False),
        bw_compiler=compiler(True),
        inference_compiler=compiler(False) if short is None else not_cut,
        partition_fn=functools.partial(_partition, cut, short),
        keep_inference_input_mutations=True,
    )(taking_a_list(given) if takes_list else given, fakes)


@dataclass(frozen=True)
class ForwardBackward:
    """The two ATen graphs of one differentiable graph.

    backward: None where nothing needs a gradient. saved: the forward nodes whose values are kept
    for backward and that are not inputs, or views of inputs.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    saved: tuple[fx.Node, ...]


@dataclass(frozen=True)
class JointGraph:
    """The one graph of forward and backward, before it is split. options: of the partitioner."""

    module: fx.GraphModule
    cut: AfterCut
    options: dict[str, Any]

    def split(self, tag: Callable[[fx.Node], None]) -> ForwardBackward:
        """The two graphs, once `tag` has said of each node of the forward what becomes of it."""
        from torch._guards import TracingContext, detect_fake_mode, tracing

        joint = _copied(self.module)
        for node in joint.graph.nodes:
            if node.op == "call_function" and not is_backward(node):
                tag(node)
        fakes = [node.meta["val"] for node in joint.graph.find_nodes(op="placeholder")]
        with tracing(TracingContext(detect_fake_mode(fakes))):  # for states of random numbers
            return _split(self.cut, joint, None, self.options)


def is_backward(node: fx.Node) -> bool:
    """Whether AOTAutograd made an operator of a joint graph in the backward."""
    return node.meta.get("partitioner_tag") == "is_backward"


def forward_backward(
    gm: fx.GraphModule,
    fakes: Sequence[Any],
    cut: AfterCut,
    joints: list[JointGraph] | None = None,
    short: Short | None = None,
) -> ForwardBackward:
    """The graphs that AOTAutograd and its min-cut partitioner make of `gm`; nothing runs.

    fakes: one a placeholder, all of one fake mode; requires_grad says what is differentiated.
    joints: gets the graph they were, where something needs a gradient. short: is traced in the
    place of `gm`.
    """
    from torch._functorch.aot_autograd import aot_module_simplified

    found: list[ForwardBackward] = []

    def partition(joint: fx.GraphModule, args: Any, **options: Any) -> Any:
        if joints is not None:
            if short is not None:
                short.grow(joint.graph)
            joints[:] = [JointGraph(_copied(joint), cut, options)]
        found.append(_split(cut, joint, args, options, None if joints is not None else short))
        return found[-1].forward, found[-1].backward

    def compiler(gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        if not found and short is not None:
            raise Unequal
        if not found:
            found.append(ForwardBackward(gm, None, ()))
        return to_be_read

    given = gm if short is None else short.module
    trace = functools.partial(aot_module_simplified, given, list(fakes), partition_fn=partition)
    with torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings():
        # on meta tensors only, and the graph has its backward
        warnings.filterwarnings("ignore", message="aten::nll_loss")
        twice(lambda: trace(fw_compiler=compiler, bw_compiler=compiler))
    return found[0]


def twice(trace: Callable[[], T]) -> T:
    """What a trace makes, done again where it asks Dynamo, once, not to make inputs of Python
    floats: the graph has their values."""
    try:
        return trace()
    except TensorifyScalarRestartAnalysis:
        made = trace()
        TensorifyState.clear()
        return made


def _copied(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy whose nodes may be tagged; the values are shared."""
    graph = fx.Graph()
    last = graph.output(graph.graph_copy(gm.graph, {}))  # type: ignore[arg-type]
    last.meta = dict(gm.graph.output_node().meta)
    return fx.GraphModule(gm, graph)


def _split(
    cut: AfterCut,
    joint: fx.GraphModule,
    args: Any,
    options: dict[str, Any],
    short: Short | None = None,
) -> ForwardBackward:
    forward, backward = _partition(cut, short, joint, args, **options)
    output = next(iter(reversed(forward.graph.nodes)))
    kept = output.args[0][options["num_fwd_outputs"] :]
    saved = [n for n in kept if isinstance(n, fx.Node) and not _is_input(n)]
    return ForwardBackward(forward, backward, tuple(dict.fromkeys(saved)))


def _partition(
    cut: AfterCut, short: Short | None, joint: fx.GraphModule, args: Any, **options: Any
) -> Any:
    """The min-cut partitioner, transpositions under the name by which it knows that a view costs
    nothing (Inductor's decompositions give them that name too): it would keep the transposed view
    of a gathered weight, and so the whole weight, from forward to backward."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def in_two(joint: fx.GraphModule) -> Graphs:
        for node in joint.graph.find_nodes(op="call_function", target=_transpose):
            dims = list(range(node.meta["val"].dim()))
            a, b = node.args[1:3]
            dims[a], dims[b] = dims[b], dims[a]
            node.target, node.args = torch.ops.aten.permute.default, (node.args[0], dims)
        return min_cut_rematerialization_partition(joint, args, **options)

    return cut_in_two(joint, in_two, cut, options["num_fwd_outputs"], short)


def cut_in_two(
    joint: fx.GraphModule,
    partition: Callable[[fx.GraphModule], Graphs],
    after: AfterCut,
    results: int,
    short: Short | None,
) -> Graphs:
    """What `partition` makes of a joint graph, or of a `short` one's and the layers that it lacks;
    and what comes `after`. results: the forward's, in front of what is kept for backward."""
    with _drawn_states_kept():
        forward, backward = partition(joint) if short is None else short.cut(joint, partition)
    print_late(forward)
    print_late(backward)
    after(forward, backward, results)
    return forward, backward


@contextlib.contextmanager
def _drawn_states_kept() -> Iterator[None]:
    """Keep the state of a generator for what is drawn again alone. The partitioner keeps one for
    each attention that is computed again, as the tag of one that draws nothing is that of dropout:
    equal layers, each with a state of its own, would not be equal."""
    from torch._functorch import partitioners

    again, functionalize = partitioners.must_recompute, partitioners.functionalize_rng_ops

    def of_what_draws(joint: fx.GraphModule, *graphs: Any) -> Any:
        drawn = mock.patch.object(
            partitioners, "must_recompute", lambda node: again(node) and draws(node)
        )
        with drawn:
            if partitioners.has_recomputable_rng_ops(joint):
                return functionalize(joint, *graphs)
        return graphs[:2]

    with mock.patch.object(partitioners, "functionalize_rng_ops", of_what_draws):
        yield


def draws(node: fx.Node) -> bool:
    """Whether an operator draws from torch's generator: attention without dropout does not."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = {**dict(zip(names, node.args)), **node.kwargs}
    return "dropout_p" not in names or bool(given.get("dropout_p"))  # which is 0 where not given


def print_late(graph: fx.GraphModule) -> None:
    """Have a module that is read as a graph be printed as code when somebody reads or calls it, as
    most of those that a compiler gets are, and not after each of our stages."""
    if type(graph).__bases__ == (fx.GraphModule,):  # each has a class of its own
        graph.__class__ = type(type(graph).__name__, (_LazyGraphModule,), {})
    graph.recompile()


_transpose = torch.ops.aten.transpose.int


def not_cut(*args: Any) -> Any:
    """In the place of a compiler of graphs without gradients, of which there is no joint graph."""
    raise Unequal


def to_be_read(*args: Any) -> Any:
    """Stand-in for a compiled graph where nothing is compiled."""
    raise AssertionError("this graph was made to be read, not to be run")


to_be_read._boxed_call = True  # type: ignore[attr-defined]  # what AOTAutograd looks for


def _is_input(node: fx.Node) -> bool:
    return memory_of(node).op == "placeholder"


def memory_of(node: fx.Node) -> fx.Node:
    """The node whose memory a value is in: its own, or what it is a view of."""
    while (source := viewed(node)) is not None:
        node = source
    return node


def viewed(node: fx.Node) -> fx.Node | None:
    """What a value is a view of, if it is one, or one of several that an operator gives."""
    made: Any = node.args[0] if node.target is operator.getitem else node
    schema = getattr(getattr(made, "target", None), "_schema", None)
    if schema is None or not schema.arguments or not made.args:
        return None
    first, source = schema.arguments[0].alias_info, made.args[0]
    is_view = first is not None and not first.is_write and isinstance(source, fx.Node)
    return source if is_view else None
