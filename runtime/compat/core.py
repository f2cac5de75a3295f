"""Torch's private parts, one function each, with the reason; compilers' have files of their own,
`compat_*.py`. Nothing else touches what is private.

Tried on torch 2.13; written to run on 2.11. `probe()` says at import of the backend what is
missing, by name, where another version moved something.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch._dynamo.exc
from torch import fx
from torch._dynamo.exc import TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from autoshard.runtime.errors import AutoshardError, message

F = TypeVar("F", bound=Callable[..., Any])

MINIMUM = (2, 11)

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

    @property
    def of_model(self) -> bool:
        """Whether the value is an attribute of the compiled module: a parameter or a buffer."""
        return self.source.startswith("L['self']")

    @property
    def name(self) -> str:
        """The dotted path: `a.weight` of `L['self']._modules['a']._parameters['weight']`."""
        name = re.sub(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1", self.source)
        name = re.sub(r"\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", name)
        return re.sub(r"^L\.(self|fn)\.", "", name)


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


def detached_locals(parameters: Sequence[DTensor]) -> list[torch.Tensor]:
    """The local tensors, a fresh object each, without autograd."""
    return [parameter._local_tensor.detach() for parameter in parameters]


def dtensor_like(parameter: DTensor, local: torch.Tensor) -> DTensor:
    """`local` in a DTensor with the mesh, placements and metadata of `parameter`, without autograd.

    Without `__init__` too, which does nothing and asks Dynamo's leave for it: 5 of 7 microseconds.
    """
    return DTensor.__new__(DTensor, local, parameter._spec, requires_grad=False)


def set_stored(parameter: DTensor, new: DTensor) -> None:
    """Give a parameter the storage, dtype and device of another DTensor; it stays the same object.

    `torch.utils.swap_tensors`, which modules use, refuses what Dynamo holds weak references to.
    """
    parameter.data = new
    parameter._local_tensor, parameter._spec = new._local_tensor, new._spec
    share_spec(parameter)


def share_spec(parameter: DTensor) -> None:
    """Make equal specs one object, so that a guard sees by identity that they are equal."""
    spec = parameter._spec
    key = (id(spec.mesh), spec.placements, spec.tensor_meta)
    parameter._spec = _specs.setdefault(key, spec)


# Weakly: a mesh, by whose identity they are found, is alive as long as a spec holds it.
_specs: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()


plain_attributes = torch._C.DisableTorchFunctionSubclass
"""Inside, reading `grad`, `requires_grad` or hooks of a DTensor does not first ask its class."""


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply` without the search for dead wrappers of torch.func among the arguments."""
    if torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


AccumulateGrad: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
"""The class of the autograd nodes that write a leaf's `.grad`."""


def will_execute(leaf: Any) -> bool:
    """Whether the backward that runs now is going to execute the node of a leaf.

    `backward(inputs=...)` leaves others out. Under `autograd.grad` the engine refuses the question:
    there the gradient is handed to the caller, and nothing is stored.
    """
    try:
        return torch._C._will_engine_execute_node(leaf)
    except RuntimeError:
        return False


def is_in_a_graph(leaf: torch.Tensor) -> bool:
    """Whether a graph of autograd waits to hand a leaf its gradient; nothing says so in public."""
    return leaf._use_count() > 1  # type: ignore[attr-defined, no-any-return]


def move_hooks(old: torch.Tensor, new: torch.Tensor) -> None:
    """Give `new` the hooks registered on the leaf `old`, so that their handles still remove them.

    There is no public way to list hooks; a handle keeps a reference to these very dicts.
    """
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(old, name, None)
        if hooks:
            setattr(new, name, hooks)


def has_hooks(leaf: torch.Tensor) -> bool:
    """Whether anything waits for the gradient of a leaf; there is no public way to list hooks."""
    return bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks)  # type: ignore[attr-defined]


def drop_accumulated_hooks(leaf: torch.Tensor) -> None:
    """Forget the hooks that `register_post_accumulate_grad_hook` put on a leaf; `move_hooks` has
    given another one the same dict."""
    leaf._post_accumulate_grad_hooks = None  # type: ignore[attr-defined, assignment]


def registered_backend(name: str) -> Callable[..., Any]:
    """The function torch.compile(backend=name) calls, which only Dynamo's registry knows."""
    found: Callable[..., Any] = torch._dynamo.lookup_backend(name)
    return found


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
