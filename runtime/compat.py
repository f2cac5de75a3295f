"""Everything that touches torch's private parts, one function each, with the reason.

Tried on torch 2.13; written to run on 2.11. `probe()` says at import of the backend what is
missing, by name, where another version moved something.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch._dynamo.exc
from torch import fx
from torch._dynamo.exc import TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis
from torch._dynamo.symbolic_convert import TensorifyState
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._ordered_set import OrderedSet

from autoshard.runtime.errors import AutoshardError, message

F = TypeVar("F", bound=Callable[..., Any])

MINIMUM = (2, 11)

Finish = Callable[[fx.GraphModule, bool], Any]
"""Called with each graph AOTAutograd makes, and whether it is the backward, to rewrite it."""

DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {}
"""Operators that Inductor gets in smaller ones, which it fuses."""

Order = Callable[[fx.Graph], dict[fx.Node, list[fx.Node]]]
"""The nodes of a graph that each of its nodes must come after, besides those it reads."""

allow_in_graph = torch.compiler.allow_in_graph
mark_dynamic = torch._dynamo.mark_dynamic  # documented, and under no other name


class RestartTrace(UnspecializeRestartAnalysis, TensorifyScalarRestartAnalysis):
    """Raised by the backend to make Dynamo trace the frame again from the start.

    Both bases are needed: the first makes Dynamo clear its log of speculations (the second trace
    reads other attributes than the first), the second is the only exception that Dynamo lets
    through from a backend call unwrapped.

    keep: objects that must outlive the unwinding of the failed trace, whose bookkeeping is keyed
    by their id.
    """

    def __init__(self, reason: str = "autoshard stored the parameters as shards", keep: Any = None):
        super().__init__(restart_reason=reason)
        self.keep = keep


class GraphInput(NamedTuple):
    """One placeholder of a Dynamo graph.

    source: the expression by which Dynamo finds the value, such as `L['x']`. real: the value of
    this call, None for a symbolic size. fake: what the graph was traced with.
    """

    source: str
    real: torch.Tensor | None
    fake: Any


def graph_inputs(gm: fx.GraphModule) -> list[GraphInput]:
    """The placeholders of a graph as a Dynamo backend receives it, in order.

    Only valid during the backend call: Dynamo then forgets the sources.
    """
    found = []
    for node in gm.graph.nodes:
        if node.op != "placeholder":
            continue
        # The only link from a placeholder to the user's object: Dynamo's own record of it.
        record = node.meta.get("grapharg")
        source = getattr(record, "source", None)
        name = getattr(source, "name", node.name)
        example = getattr(record, "example", None)
        found.append(
            GraphInput(
                name() if callable(name) else name,  # a method before 2.12, a property since
                example if isinstance(example, torch.Tensor) else None,
                node.meta.get("example_value"),
            )
        )
    return found


def backend_fakes(placeholders: Sequence[fx.Node]) -> list[Any]:
    """The placeholders' `meta["val"]` in the fake mode AOTAutograd will use.

    Dynamo traces in one fake mode and hands the backend another one that shares its symbols; a
    fake of the first is refused by the second. Plain sizes stay static: fakes made from the real
    shards would become symbolic.
    """
    context = torch._guards.TracingContext.try_get()
    mode = None if context is None else context.fake_mode
    fakes = []
    for node in placeholders:
        fake = node.meta["val"]
        if mode is not None and isinstance(fake, FakeTensor) and fake.fake_mode is not mode:
            with mode, torch.inference_mode(False):
                fake = torch.empty_strided(
                    fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device
                ).requires_grad_(fake.requires_grad)
        fakes.append(fake)
    return fakes


def allow_rnn() -> None:
    """Let Dynamo trace nn.LSTM and its kin, which it otherwise leaves to eager code.

    It refuses them because compiling one is slow. In eager code every weight of the model around
    one is gathered by itself; traced, the RNN is one operator among others.
    """
    torch._dynamo.config.allow_rnn = True


def never_a_frame(fn: F) -> F:
    """`fn`, which Dynamo inlines where it traces a caller, and never compiles by itself.

    Between graphs Dynamo would take each call, and each function called from it, for the user's
    code, compile it, and plan the parameters it reads. torch.compiler.disable would break the
    graphs that inline `fn`; the strategy concerns frames that start to execute only.
    """
    frames: Any = torch._dynamo.types
    skip = frames.FrameAction.SKIP
    torch._C._dynamo.eval_frame.set_code_exec_strategy(
        fn.__code__, frames.FrameExecStrategy(skip, skip)
    )
    return fn


@contextlib.contextmanager
def explicit_modes(grad: bool) -> Iterator[None]:
    """Autocast off, and gradients on where `grad`: what a captured graph is compiled and run in.

    Its casts are operators of its own; autocast around it would add others, also in regions that
    the model excluded. The private guard turns off every device's autocast at once.
    """
    with torch._C._DisableAutocast(), torch.enable_grad() if grad else contextlib.nullcontext():
        yield


def autocast_is_on() -> bool:
    """Whether any device's autocast is enabled; Dynamo guards on it."""
    return bool(torch._C._is_any_autocast_enabled())


def frame_id() -> int | None:
    """Which code object is being compiled: its recompilations have the same id."""
    current = torch._guards.CompileContext.current_compile_id()
    return None if current is None else current.frame_id


def in_backward() -> bool:
    """Whether this thread runs autograd's backward now; nothing public says so."""
    return torch._C._current_graph_task_id() != -1


def not_traced(fn: F) -> F:
    """`fn`, which Dynamo calls as it is and never looks into."""
    return torch.compiler.disable(fn)  # type: ignore[no-any-return]


def backend_error(error: BaseException) -> BaseException | None:
    """The exception a backend raised, from the one Dynamo wrapped it in; None for others."""
    return getattr(error, "inner_exception", None)


def nccl_communicator(group: Any) -> int:
    """The address of a process group's ncclComm_t, which no public function tells."""
    return int(group._get_backend(torch.device("cuda"))._comm_ptr())


def process_group(name: str) -> Any:
    """The process group of a name; torch's public functions take groups, its operators names."""
    from torch._C._distributed_c10d import _resolve_process_group
    return _resolve_process_group(name)  # type: ignore[arg-type]


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """Real, lasting tensors whatever the caller's modes: no fake or functional mode, no inference
    mode (its tensors can never be trained), no autograd.

    The backend is called in the middle of a trace, possibly from under inference_mode.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        yield


def wrapper_tensor(cls: type, shape: tuple[Any, ...], like: torch.Tensor, grad: bool) -> Any:
    """A tensor of subclass `cls` with a shape and no memory; dtype and device are those of `like`.

    What every wrapper subclass in torch is made by, and has no public name.
    """
    return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
        cls, shape, dtype=like.dtype, device=like.device, requires_grad=grad
    )


def has_data_mutation(functional: Any) -> bool:
    """Whether a FunctionalTensor was written to: functionalisation has no public reader."""
    return bool(torch._functionalize_has_data_mutation(functional.elem))  # type: ignore[attr-defined]


# Functions Dynamo leaves in its graph, which no public name reaches: what `x.data` is, and the
# switches of grad mode, autocast, inference mode and saved-tensor hooks.
GET_DATA = getattr(torch._C._autograd, "_get_data_attr", None)
SET_GRAD = torch._C._set_grad_enabled
ENTER_AUTOCAST = torch.amp.autocast_mode._enter_autocast
EXIT_AUTOCAST = torch.amp.autocast_mode._exit_autocast
ENTER_INFERENCE = torch.autograd.grad_mode._enter_inference_mode
EXIT_INFERENCE = torch.autograd.grad_mode._exit_inference_mode
SAVED_TENSOR_HOOKS = (
    torch._C._autograd._saved_tensors_hooks_disable,
    torch._C._autograd._saved_tensors_hooks_enable,
)


def autocast_knows(operator: str, device: str) -> bool:
    """Whether this torch gives an ATen operator an autocast rule on a device type."""
    key = f"Autocast{device.upper()}"
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operator}", key)


def shard_placement(dim: int, inner: int) -> Placement:
    """Shard `dim`, which inner mesh axes have already split into `inner` parts before this one.

    The class torch's FSDP uses for "tp first, then dp" on one dim is private.
    """
    return Shard(dim) if inner == 1 else _StridedShard(dim, split_factor=inner)


def placement_dim(placement: Placement) -> int | None:
    """The sharded dim of a stored placement, or None for Replicate.

    `is_shard()` and isinstance(_, Shard) are both False for the strided kind.
    """
    if isinstance(placement, (Shard, _StridedShard)):
        return placement.dim
    if isinstance(placement, Replicate):
        return None
    raise AutoshardError(
        message(
            f"a parameter is stored as {placement}",
            remedy="Parameters may be stored as Shard or Replicate.",
        )
    )


def local_of(tensor: DTensor) -> torch.Tensor:
    """The local tensor itself: `to_local()` costs an autograd function a call."""
    return tensor._local_tensor


def spec_of(tensor: DTensor) -> Any:
    """Mesh, placements and global metadata, to build a DTensor like this one."""
    return tensor._spec


def dtensor(local: torch.Tensor, spec: Any) -> DTensor:
    """A DTensor around `local`, without autograd.

    Without `__init__` too, which does nothing and asks Dynamo's leave for it: 5 of 7 microseconds.
    """
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def stores_gradient(node: Any) -> bool:
    """Whether an autograd node is the one that writes a leaf's `.grad`; its class has no name."""
    return isinstance(node, torch._C._functions.AccumulateGrad)  # type: ignore[attr-defined]


def will_execute(leaf: Any) -> bool:
    """Whether the backward that runs now is going to execute the node of a leaf.

    `backward(inputs=...)` leaves others out. Under `autograd.grad` the engine refuses the question:
    there the gradient is handed to the caller, and nothing is stored.
    """
    try:
        return torch._C._will_engine_execute_node(leaf)
    except RuntimeError:
        return False


def move_hooks(old: torch.Tensor, new: torch.Tensor) -> None:
    """Give `new` the hooks registered on the leaf `old`, so that their handles still remove them.

    There is no public way to list hooks; a handle keeps a reference to these very dicts.
    """
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(old, name, None)
        if hooks:
            setattr(new, name, hooks)


def registered_backend(name: str) -> Callable[..., Any]:
    """The function torch.compile(backend=name) calls, which only Dynamo's registry knows."""
    found: Callable[..., Any] = torch._dynamo.lookup_backend(name)
    return found


def aot_eager(
    gm: fx.GraphModule, fakes: Sequence[Any], finish: Finish | None = None
) -> Callable[..., Any]:
    """AOTAutograd's forward and backward graphs, run operator by operator."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def compiler(backward: bool) -> Callable[..., Any]:
        def compile_graph(graph: fx.GraphModule, inputs: Any) -> Any:
            if finish is not None:
                finish(graph, backward)
            return boxed_nop(graph, inputs)

        return compile_graph

    return aot_autograd(
        fw_compiler=compiler(False),
        bw_compiler=compiler(True),
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )(gm, fakes)


def inductor(
    gm: fx.GraphModule,
    fakes: Sequence[Any],
    finish: Finish | None = None,
    digest: str = "",
    order: Order | None = None,
) -> Callable[..., Any]:
    """AOTAutograd and Inductor. digest: what `finish` depends on besides the graph. order: what
    Inductor must keep."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def inner_compile(graph: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        if finish is None:
            return compile_fx_inner(graph, inputs, **options)
        finish(graph, bool(options.get("is_backward")))
        with config.patch(post_grad_custom_post_pass=_keep_order(order)):
            return compile_fx_inner(graph, inputs, **options)

    add_decompositions()
    # AOTAutograd's cache takes only functions it is told of; the value becomes part of the key.
    known = config.unsafe_marked_cacheable_functions
    with config.patch(unsafe_marked_cacheable_functions={**known, **_cache_keys(gm, digest)}):
        compiled: Any = compile_fx(gm, fakes, inner_compile=inner_compile)
    return compiled  # type: ignore[no-any-return]


def add_decompositions() -> None:
    """Give Inductor `DECOMPOSITIONS`.

    In its own table: a table given by argument is part of the key of Inductor's cache, which
    cannot write it down, and then caches nothing.
    """
    from torch._inductor.decomposition import decompositions, fast_random_decomps

    if not decompositions.keys() >= DECOMPOSITIONS.keys():
        decompositions.update(DECOMPOSITIONS)
        fast_random_decomps.cache_clear()


def _cache_keys(gm: fx.GraphModule, digest: str) -> dict[str, str]:
    """A key for each of our functions in the graph: `digest`, and what the graph's text lacks."""
    functions, tags = set(), [digest]
    for node in gm.graph.nodes:
        module = getattr(node.target, "__module__", None) or ""
        if node.op == "call_function" and module.startswith("autoshard."):
            functions.add(f"{module}.{node.target.__name__}")
        tag = [node.meta.get(key) for key in ("recompute", "ac_graph_id")]
        if any(t is not None for t in tag):
            tags.append(f"{node.name} {tag}")
    key = hashlib.sha256("\n".join(tags).encode()).hexdigest()
    return {name: key for name in sorted(functions)}


def fresh_cache() -> contextlib.AbstractContextManager[Any]:
    """Caches of Inductor and of AOTAutograd that are empty, and gone at the end; for measuring."""
    from torch._inductor.utils import fresh_cache

    return fresh_cache()  # type: ignore[no-any-return]


def allocators() -> Any:
    """The module by whose `_empty_strided_cpu` Inductor's code allocates, past every mode."""
    return torch._C._dynamo.guards


def _keep_order(order: Order | None) -> Any:
    """Inductor's pass after its own passes: what is set there, then the dependencies.

    Only a class with a `uuid` lets Inductor cache what it compiles.
    """
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    theirs: Any = config.post_grad_custom_post_pass
    if order is None:
        return theirs
    chosen = order

    class KeepOrder(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering

            if theirs is not None:
                theirs(graph)
            needed = chosen(graph)
            preserve_node_ordering(graph, {n: OrderedSet(deps) for n, deps in needed.items()})

        def uuid(self) -> Any:
            ours = get_hash_for_files((__file__, chosen.__code__.co_filename))
            if theirs is None:
                return ours
            other = theirs.uuid() if isinstance(theirs, CustomGraphPass) else None
            return other and (ours, other)

    return KeepOrder()


@dataclass(frozen=True)
class ForwardBackward:
    """The two ATen graphs of one differentiable graph.

    backward: None where nothing needs a gradient. saved: the forward nodes whose values are kept
    for backward and that are not inputs, or views of inputs.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    saved: tuple[fx.Node, ...]


def forward_backward(gm: fx.GraphModule, fakes: Sequence[Any]) -> ForwardBackward:
    """What AOTAutograd and its min-cut partitioner make of `gm`; compiles and runs nothing.

    fakes: one a placeholder, all of one fake mode; requires_grad says what is differentiated.
    """
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    found: list[ForwardBackward] = []

    def partition(joint: fx.GraphModule, args: Any, **options: Any) -> Any:
        forward, backward = min_cut_rematerialization_partition(joint, args, **options)
        output = next(iter(reversed(forward.graph.nodes)))
        kept = output.args[0][options["num_fwd_outputs"] :]
        saved = [n for n in kept if isinstance(n, fx.Node) and not _is_input(n)]
        found.append(ForwardBackward(forward, backward, tuple(dict.fromkeys(saved))))
        return forward, backward

    def compiler(gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        if not found:
            found.append(ForwardBackward(gm, None, ()))
        run = functools.partial(_not_run, gm)
        run._boxed_call = True  # type: ignore[attr-defined]  # what AOTAutograd looks for
        return run

    trace = functools.partial(aot_module_simplified, gm, list(fakes), partition_fn=partition)
    with torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings():
        # on meta tensors only, and the graph has its backward
        warnings.filterwarnings("ignore", message="aten::nll_loss")
        try:
            trace(fw_compiler=compiler, bw_compiler=compiler)
        except TensorifyScalarRestartAnalysis:
            # asks Dynamo, once, not to make inputs of Python floats; the graph has their values
            trace(fw_compiler=compiler, bw_compiler=compiler)
            TensorifyState.clear()
    return found[0]


def _not_run(graph: fx.GraphModule, *args: Any) -> Any:
    raise AssertionError("this graph was made to be read, not to be run")


def _is_input(node: fx.Node) -> bool:
    while node.op == "call_function":
        schema = getattr(node.target, "_schema", None)
        first = schema.arguments[0].alias_info if schema and schema.arguments else None
        if first is None or first.is_write or not isinstance(node.args[0], fx.Node):
            return False
        node = node.args[0]
    return node.op == "placeholder"


def probe() -> None:
    """Raise AutoshardError where this torch lacks what autoshard stands on."""
    if tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) < MINIMUM:
        raise AutoshardError(
            message(
                f"torch {torch.__version__} is too old",
                remedy=f"Install torch {'.'.join(map(str, MINIMUM))} or later.",
            )
        )
    required = {
        "torch.distributed.tensor.DTensor._spec": hasattr(DTensor, "__tensor_flatten__"),
        "torch._C._TensorBase._post_accumulate_grad_hooks": hasattr(
            torch.Tensor, "_post_accumulate_grad_hooks"
        ),
        "torch._guards.TracingContext": hasattr(torch._guards, "TracingContext"),
        "torch.ops._c10d_functional": hasattr(torch.ops, "_c10d_functional"),
    }
    missing = [name for name, present in required.items() if not present]
    if missing:
        raise AutoshardError(
            message(
                f"torch {torch.__version__} has no {', '.join(missing)}",
                remedy="autoshard was written for torch 2.11 to 2.13; install one of them.",
            )
        )
