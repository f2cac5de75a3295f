"""Dynamo's inputs to a backend, how it guards them and treats frames: private parts of torch."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, TypeVar

import torch
import torch._dynamo.exc
import torch._logging
from torch import fx, nn
from torch._dynamo.exc import (
    TensorifyScalarRestartAnalysis,
    TorchDynamoException,
    UnspecializeRestartAnalysis,
    exceptions_allowed_to_be_fallback,
)
from torch._dynamo.guards import get_verbose_code_parts
from torch._dynamo.symbolic_convert import TensorifyState
from torch._guards import Guard
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from autoshard.runtime.graph_meta import REWRITTEN

F = TypeVar("F", bound=Callable[..., Any])

allow_in_graph = torch.compiler.allow_in_graph
mark_dynamic = torch._dynamo.mark_dynamic  # documented, and under no other name
TraceError = TorchDynamoException  # of what torch.compile cannot trace, and of nothing else

RESTARTS = (
    UnspecializeRestartAnalysis,
    TensorifyScalarRestartAnalysis,
    *exceptions_allowed_to_be_fallback,
)
"""Exceptions by which a trace, or a compiler in it, asks Dynamo to trace the frame again; with a
graph break before what no fake tensor can say (the number in a tensor, a shape that it decides)."""


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


@dataclass(frozen=True, kw_only=True)
class GraphInput:
    """A placeholder of a Dynamo graph.

    source: the expression by which Dynamo finds the value, such as `L['x']`. name: the dotted
    path, `a.weight` of the compiled module's own `a.weight`, `L.x` of an argument x. key: the last
    name on the way that is an argument's or a dict's. of_model: whether the value is an attribute
    of a module: a parameter, a buffer or another tensor. real: the value of this call, None for a
    symbolic size. fake: what the graph was traced with.
    """

    source: str
    name: str
    key: str
    of_model: bool
    real: torch.Tensor | None
    fake: Any

    def is_as_traced(self, now: Any) -> bool:
        """Whether the value is the one that is found there `now`, and like it was."""
        real, fake = self.real, self.fake
        if now is not real or real is None or fake is None or real.device != fake.device:
            return False
        if not isinstance(real, DTensor):
            return True
        asked = [(x.shape, x.stride(), x.dtype, x.requires_grad) for x in (real, fake)]
        return asked[0] == asked[1]


_CONTAINERS = ("_modules", "_parameters", "_buffers")  # of a module, which a dotted path leaves out


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
        example = getattr(record, "example", None)
        path, key = _source_path(source)
        # Dynamo guards on what it reached through a module as such, wherever that came from
        of_model = "NN_MODULE" in getattr(getattr(source, "guard_source", None), "name", "")
        model = _model_in_the_frame(path) if of_model else 0
        found.append(
            GraphInput(
                source=name_of(source) or node.name,
                name=".".join(path[model:]) or node.name,
                key=key,
                of_model=of_model,
                real=example if isinstance(example, torch.Tensor) else None,
                fake=node.meta.get("example_value"),
            )
        )
    return found


def _model_in_the_frame(path: Sequence[str]) -> int:
    """How many steps of a path lead to the compiled module; 0 where it does not go through it.

    It is the first argument of a method (`self`, mostly), or the first of the `*args` of a function
    that a decorator put in the method's place.
    """
    ways: list[tuple[str, ...]] = [("L", "self"), ("L", "fn")]
    code = compiled_code()
    if code is not None and code.co_argcount:
        if "." in code.co_qualname.rpartition("<locals>.")[2]:
            ways.append(("L", code.co_varnames[0]))
    elif code is not None and code.co_flags & inspect.CO_VARARGS:
        ways.append(("L", code.co_varnames[code.co_kwonlyargcount], "0"))
    return next((len(way) for way in ways if way == path[: len(way)] != path), 0)


def _source_path(source: Any) -> tuple[tuple[str, ...], str]:
    """The steps from the frame ("L" locals, "G" globals) to a value, and the last key among them.

    Dynamo's sources are a chain: of attributes and items, down to the name of a local or global.
    """
    for root, attribute in (("L", "local_name"), ("G", "global_name")):
        name = getattr(source, attribute, None)
        if name is not None:
            return (root, name), name
    base = getattr(source, "base", None)
    if base is None:
        return (), ""
    path, key = _source_path(base)
    if hasattr(source, "member"):
        return (*path, source.member), key
    if not hasattr(source, "index"):
        return path, key  # a module as such, say
    # the key of a dict may be a source itself
    index = source.index.index if hasattr(source.index, "base") else source.index
    if getattr(base, "member", None) in _CONTAINERS:
        path = path[:-1]
    return (*path, str(index)), index if isinstance(index, str) else key


def name_of(source: Any) -> str:
    """The expression by which Dynamo finds a value; "" without a source."""
    name = getattr(source, "name", "")
    return name() if callable(name) else name  # a property since 2.12


def specialize_floats(gm: fx.GraphModule) -> None:
    """Have Dynamo trace again with the Python floats that it made inputs of `gm` as constants.

    It does so to floats that change between calls, and to all with `dynamic=True`: a tensor that
    holds the float, and its item, which AOTAutograd takes apart with the symbol Dynamo left on it.
    Our capture has no such symbols. The float is guarded: another one is another program.
    """
    found = set()
    for node in gm.graph.nodes:
        item = getattr(node.meta.get("example_value"), "item_memo", None)
        # a float that a tensor of the user holds has no value yet
        if node.op == "placeholder" and isinstance(item, torch.SymFloat) and item.node.has_hint():
            found.add(item.node._expr.name)
    new = {name for name in found if not TensorifyState.should_specialize(name)}
    for name in new:
        TensorifyState.specialize(name)
    if new:
        raise TensorifyScalarRestartAnalysis("autoshard takes Python floats for constants")


def hold_sizes(tensors: Sequence[torch.Tensor]) -> bool:
    """Have Dynamo trace a caller's tensors with their sizes as numbers; whether any is new to that.

    What `torch._dynamo.mark_static` does, which while Dynamo compiles marks what is traced instead.
    """
    new = [one for one in tensors if not hasattr(one, "_dynamo_static_indices")]
    for one in new:
        one._dynamo_static_indices = set(range(one.dim()))  # type: ignore[attr-defined]
    return bool(new)


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
        fakes.append(no_leaf(fake) if node.meta.get(REWRITTEN) else fake)
    return fakes


def no_leaf(fake: Any) -> Any:
    """A fake that may be written to where it has a gradient; a clone has other strides."""
    with fake.fake_mode, torch.inference_mode(False), torch.enable_grad():
        empty = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
        return empty.copy_(fake)


def never_a_frame(fn: F) -> F:
    """`fn`, which Dynamo inlines where it traces a caller, and never compiles by itself.

    Between graphs Dynamo would take each call, and each function called from it, for the user's
    code, compile it, and plan the parameters it reads. torch.compiler.disable would break the
    graphs that inline `fn`; the strategy concerns frames that start to execute only.
    """
    leave_frame(fn.__code__, "SKIP")
    return fn


def leave_frame(code: CodeType, inside: str) -> None:
    """Have Dynamo leave frames of `code` to eager code. inside: its action on what they call."""
    frames: Any = torch._dynamo.types
    actions = frames.FrameAction.SKIP, getattr(frames.FrameAction, inside)
    strategy = frames.FrameExecStrategy(*actions)
    torch._C._dynamo.eval_frame.set_code_exec_strategy(code, strategy)


_SAYS_SO = "_compile_session_context" in vars(torch.compiler)


def compiling() -> bool:
    """Whether torch.compile, torch.export or AOTAutograd is at work in this thread.

    `torch.compiler.is_compiling` says so since torch 2.13. In 2.11 it says so inside of what is
    traced only, and what Dynamo asks of a tensor while it traces looks like eager code: a stored
    parameter would be gathered, by the ranks that compile.
    """
    if _SAYS_SO or torch.compiler.is_compiling():
        return torch.compiler.is_compiling()
    return torch._guards.CompileContext.current_compile_id() is not None


def running_ddp() -> Any:
    """The DistributedDataParallel whose forward runs, by which Dynamo cuts graphs; None if none."""
    return DistributedDataParallel._get_active_ddp_module()


def called_from(name: str, above: int) -> bool:
    """Whether the function `above` frames over the caller has this name."""
    frame = inspect.currentframe()
    for _ in range(above + 1):
        frame = None if frame is None else frame.f_back
    return frame is not None and frame.f_code.co_name == name


def compiled_code() -> CodeType | None:
    """The code object of the frame that Dynamo is compiling; its recompilations have the same."""
    if torch._guards.CompileContext.current_compile_id() is None:
        return None
    translator: Any = torch._dynamo.symbolic_convert.InstructionTranslator.current_tx()
    code: CodeType = translator.output.root_tx.f_code
    return code


def not_traced(fn: F) -> F:
    """`fn`, which Dynamo calls as it is and never looks into."""
    return torch.compiler.disable(fn)  # type: ignore[no-any-return]


def backend_error(error: BaseException) -> BaseException | None:
    """The exception a backend raised, from the one Dynamo wrapped it in; None for others."""
    return getattr(error, "inner_exception", None)


def registered_backend(name: str) -> Callable[..., Any]:
    """The function torch.compile(backend=name) calls, which only Dynamo's registry knows."""
    found: Callable[..., Any] = torch._dynamo.lookup_backend(name)
    return found


def artifact(name: str, text: Callable[[], str]) -> None:
    """Record a text under `name` with the compilation in progress, for tlparse; `text` is called
    only where TORCH_TRACE asks for a trace. torch has no public name for it.
    """
    torch._logging.trace_structured(  # type: ignore[attr-defined]
        "artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text
    )


def lighten_guards(inputs: Mapping[str, nn.Parameter]) -> None:
    """Make the guards that Dynamo has for stored parameters of the graph being compiled cheap.

    inputs: by the source of each (see `compat.graph_inputs`). Dynamo guards of each the type,
    the spec by a comparison with a deep copy, `requires_grad`, the local tensor and the marks of
    dynamic sizes it does not have; of its module the property by which it is read, with closure
    and code. By the next step most of that has left the cache. One guard asks for the spec, by
    identity first, and `requires_grad`: the local tensor of a stored parameter follows from its
    spec, and the classes that `access` makes are never written to. Of a trace of the plain
    parameter (`store_in_trace`) it takes the place of the guard of that one.
    """
    context = torch._guards.TracingContext.try_get()
    if context is None:
        return
    found = context.guards_context.dynamo_guards.inner
    guarded = {g.name for g in found if g.create_fn_name() == "DTENSOR_SPEC_MATCH"}
    plain = {g.name for g in found if g.create_fn_name() == "TENSOR_MATCH"} & inputs.keys()
    parameters: dict[str, Any] = {
        source: parameter
        for source, parameter in inputs.items()
        if isinstance(parameter, DTensor) and (f"{source}._spec" in guarded or source in plain)
    }
    plain &= parameters.keys()
    # a frozen parameter would pass where none of its attributes is asked for
    asked = _ASKED - {"requires_grad"} if skips_tensors() else _ASKED
    modules = {source.rpartition("._parameters[")[0] for source in parameters}
    checks: dict[tuple[int, bool], Callable[[Any], bool]] = {}
    for guard in list(found):
        owner, _, part = guard.name.rpartition(".")
        if guard.create_fn_name() == "TYPE_MATCH":
            owner, part = guard.name, "type"
        read = _CLASS.search(guard.name)
        whole = guard.name in plain and guard.create_fn_name() == "TENSOR_MATCH"
        if whole or (owner in parameters and part in asked):
            found.discard(guard)
            if whole or part == "_spec":
                source: Any = guard.originating_source
                of = parameters[guard.name if whole else owner]
                key = id(of._spec), of.requires_grad
                check = checks.setdefault(key, _stored_alike(of._spec, of.requires_grad))
                create = functools.partial(_guard_parameter, check)
                base = source if whole else source.base
                found.add(Guard(base, create, stack=guard.stack, user_stack=guard.user_stack))
        elif part == "device_mesh" and guard.create_fn_name() == "DUPLICATE_INPUT":
            found.discard(guard)  # that parameters share a mesh follows from their specs
        elif read and read[1] in modules:
            found.discard(guard)


def skips_tensors() -> bool:
    """Whether guards of tensors in a dict that nobody wrote to are skipped, as by torch 2.11."""
    return bool(getattr(torch._dynamo.config, "use_recursive_dict_tags_for_guards", False))


_ASKED = {"type", "_spec", "requires_grad", "_local_tensor", "device_mesh"}
"""The parts of a DTensor that Dynamo guards."""

_CLASS = re.compile(r"\btype\((.+?)\)\.(?:__mro__\[1\]\.)?__dict__")
"""Attributes of a module read from its own class, or the next: the classes of `access`."""


def _guard_parameter(check: Callable[[Any], bool], builder: Any, guard: Guard) -> None:
    said = get_verbose_code_parts(f"stored as before: {guard.name}", guard)
    builder.get_guard_manager(guard).add_lambda_guard(check, said, guard.user_stack)


def _stored_alike(spec: Any, needs: bool) -> Callable[[Any], bool]:
    """Whether a parameter is a DTensor of this spec, needing a gradient or not."""

    def check(now: Any) -> bool:
        return (
            isinstance(now, DTensor)
            and now.requires_grad is needs
            and (now._spec is spec or now._spec == spec)
        )

    return check
