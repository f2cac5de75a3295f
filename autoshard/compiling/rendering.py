"""`render(gm)`: a graph as stable text, one operator a line.

    %x: f32[8,16]
    %lin.weight: f32[32,16]
    %0: f32[8,32] = linear(%x, %lin.weight)
    %1: f32[8,32] = redistribute(%0, P -> I, tp)
    return (%1)

The text has no addresses, no spelling of torch's that changes between versions, and numbers nodes
by their position, so that golden tests can hold it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload

from autoshard.passes import module_path
from autoshard.runtime.collectives import Axis, redistribute

_TYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}
# Arguments that say where a tensor lives, which is the same everywhere in a graph.
_QUIET = ("pin_memory", "layout", "device", "memory_format")
_LONGEST = 60  # characters of a text among the arguments


def render(gm: fx.GraphModule, *, axes: Sequence[Axis] = (), modules: bool = False) -> str:
    """The graph of `gm` as text, with a final newline.

    axes: mesh axes whose process groups appear in collectives by group name; a collective of
    another group shows the group's own name. modules: add the module each node comes from, at the
    right.
    """
    return _Text(gm.graph, axes).text(modules)


def type_text(val: Any) -> str:
    """`f32[8,s3]` of a tensor, the symbol of a symbolic size, `(f32[2], i64[2])` of a tuple."""
    if isinstance(val, torch.Tensor):
        dtype = _TYPES.get(val.dtype, str(val.dtype).removeprefix("torch."))
        return f"{dtype}[{','.join(str(size) for size in val.shape)}]"
    if isinstance(val, (tuple, list)):
        return f"({', '.join(type_text(element) for element in val)})"
    if isinstance(val, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return str(val)
    return type(val).__name__


def input_name(target: str) -> str:
    """Dynamo's placeholder name -> the parameter's: `l_self_modules_a_parameters_b_` -> `a.b`."""
    name = re.sub(r"^[lg]_(self_|fn_|kwargs_)?", "", target).removesuffix("_")
    name = re.sub(r"(^|_)(modules|parameters|buffers)_", ".", name).strip(".")
    return name or target


class _Text:
    def __init__(self, graph: fx.Graph, axes: Sequence[Axis]) -> None:
        self.graph = graph
        self.groups = {axis.group: axis.name for axis in axes}
        self.names: dict[fx.Node, str] = {}
        self.count = 0

    def text(self, modules: bool) -> str:
        lines = [
            (line, module_path(node)) for node in self.graph.nodes if (line := self.line(node))
        ]
        width = max((len(line) for line, _ in lines), default=0)
        if modules:
            return "".join(
                f"{line.ljust(width)}  # {path}\n" if path else f"{line}\n" for line, path in lines
            )
        return "".join(f"{line}\n" for line, _ in lines)

    def line(self, node: fx.Node) -> str:
        if node.op == "output":
            returned: Any = node.args[0]
            elements = returned if isinstance(returned, (tuple, list)) else (returned,)
            return f"return ({', '.join(map(self.argument, elements))})"
        if node.target is torch.ops._c10d_functional.wait_tensor.default:
            self.names[node] = self.argument(node.args[0])
            return ""
        if "val" in node.meta and node.meta["val"] is None:
            return self.call(node)
        if node.op == "placeholder":
            name = input_name(str(node.target))
            taken = f"%{name}" in self.names.values()
            self.names[node] = f"%{node.name if taken else name}"
        else:
            self.names[node] = f"%{self.count}"
            self.count += 1
        kind = f": {type_text(node.meta['val'])}" if "val" in node.meta else ""
        if node.op == "placeholder":
            return f"{self.names[node]}{kind}"
        if node.op == "get_attr":
            return f"{self.names[node]}{kind} = constant({node.target})"
        return f"{self.names[node]}{kind} = {self.call(node)}"

    def call(self, node: fx.Node) -> str:
        if node.op == "call_function" and (special := _CALLS.get(node.target)):
            return special(self, node)
        arguments = [self.argument(arg) for arg in node.args]
        arguments += [
            f"{key}={self.argument(arg)}" for key, arg in node.kwargs.items() if key not in _QUIET
        ]
        return f"{target_name(node.target)}({', '.join(arguments)})"

    def argument(self, arg: Any) -> str:
        if isinstance(arg, fx.Node):
            return self.names[arg]
        if isinstance(arg, Axis):
            return arg.name
        if isinstance(arg, (list, tuple)):
            return f"[{', '.join(map(self.argument, arg))}]"
        if isinstance(arg, torch.dtype):
            return _TYPES.get(arg, str(arg).removeprefix("torch."))
        if isinstance(arg, (torch.device, torch.layout, torch.memory_format)):
            return str(arg).removeprefix("torch.")
        if isinstance(arg, str):  # the program of an expert is a long one
            return arg if len(arg) <= _LONGEST else f"{arg[: _LONGEST - 3]}..."
        return repr(arg)

    def redistribute(self, node: fx.Node) -> str:
        x, source, target, axis, *extent = node.args
        known = f", {extent[0]}" if extent and extent[0] is not None else ""
        value, on = self.argument(x), self.argument(axis)
        return f"redistribute({value}, {source} -> {target}, {on}{known})"


def _collective(name: str, *, reduced: bool) -> Callable[[_Text, fx.Node], str]:
    """The text of a functional collective: (x, [reduction], ..., group name)."""

    def call(text: _Text, node: fx.Node) -> str:
        group = str(node.args[-1])
        parts = [text.argument(node.args[0]), text.groups.get(group, group)]
        if reduced:
            parts.insert(1, str(node.args[1]))
        return f"{name}({', '.join(parts)})"

    return call


_c10d = torch.ops._c10d_functional
_CALLS: dict[Any, Callable[[_Text, fx.Node], str]] = {
    redistribute: _Text.redistribute,
    _c10d.all_reduce.default: _collective("all_reduce", reduced=True),
    _c10d.reduce_scatter_tensor.default: _collective("reduce_scatter", reduced=True),
    _c10d.all_gather_into_tensor.default: _collective("all_gather", reduced=False),
    _c10d.all_gather_into_tensor_coalesced.default: _collective("all_gather", reduced=False),
    _c10d.all_to_all_single.default: _collective("all_to_all", reduced=False),
}


def target_name(target: Any) -> str:
    """The short name of what a node calls: `linear`, `transformers.grouped_mm_fallback`."""
    if isinstance(target, OpOverload):
        namespace, _, name = target._schema.name.partition("::")
        return name if namespace in ("aten", "prims") else f"{namespace}.{name}"
    if isinstance(target, HigherOrderOperator):
        return str(target.name())
    return str(getattr(target, "__name__", target))
