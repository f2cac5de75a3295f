"""torch-tensorrt (the dist torch-tensorrt-rtx) on a machine without a GPU: all that is patched.

Its converters fill networks without a GPU, but it looks for one when it is imported and when it
compiles. The networks come out as ours do, beside what the interpreter must know of them.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.metadata
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import fx

from autoshard.export.rank_graph import operators
from autoshard.export.rank_graph.graph import RankGraph
from autoshard.export.to_onnx import example_input
from autoshard.export.to_tensorrt.build import Network, Spy, shapes_of

aten = torch.ops.aten
_c10d = torch.ops._c10d_functional
DIST = "torch-tensorrt-rtx"


def unavailable() -> str | None:
    """Why these tests cannot run here, if they cannot."""
    try:
        found = importlib.metadata.version(DIST)
    except importlib.metadata.PackageNotFoundError:
        return f"{DIST} is not installed (make installs it where there is a wheel of it)"
    if found.split(".")[:2] != torch.__version__.split(".")[:2]:
        return f"{DIST} {found} is for another torch than {torch.__version__}"
    return None


@contextmanager
def without_a_gpu() -> Iterator[None]:
    """Answers, on the CPU, to what torch-tensorrt asks of a GPU."""
    real = os.path.isfile

    def isfile(path: Any) -> bool:
        # its C++ runtime links libtorch_cuda, and is loaded where the file is; without the file
        # the package is content with its Python runtime
        return "libtorchtrt" not in os.path.basename(str(path)) and real(path)

    with ExitStack() as stack:
        stack.enter_context(mock.patch("os.path.isfile", isfile))
        if not torch.cuda.is_available():
            # asked at import, to recognise one board that some converters are not for
            capability = mock.patch("torch.cuda.get_device_capability", lambda *_: (8, 9))
            # the default of the setting `device`
            current = mock.patch("torch.cuda.current_device", lambda: 0)
            # named in annotations, which are evaluated
            named = mock.patch.object(torch._C, "_CudaDeviceProperties", object, create=True)
            for patch in (capability, current, named):
                stack.enter_context(patch)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # of its own use of deprecated parts of torch
        yield


@functools.cache
def install() -> list[str]:
    """Import torch-tensorrt with its converters of collectives; the operators that had none.

    It registers them where its C++ runtime says that it was built with NCCL. They only fill a
    network, so saying it in the runtime's place is enough.
    """
    with without_a_gpu():
        importlib.import_module("torch_tensorrt")
        features = importlib.import_module("torch_tensorrt._features")
        converters = importlib.import_module(
            "torch_tensorrt.dynamo.conversion.custom_ops_converters"
        )
        registry = importlib.import_module(
            "torch_tensorrt.dynamo.conversion._ConverterRegistry"
        ).DYNAMO_CONVERTERS
        fused = [getattr(converters, name) for name in dir(converters) if "fused_nccl" in name]
        missing = [str(one) for one in fused if one not in registry]
        features.ENABLED_FEATURES = features.ENABLED_FEATURES._replace(native_trt_collectives=True)
        importlib.reload(converters)
    return missing


class Listening(Spy):
    """Records what torch-tensorrt calls, which is the older form of attention."""

    def add_attention(self, *args: Any) -> Any:
        """As INetworkDefinition's."""
        made = self.network.add_attention(*args)
        if made is not None:
            self.attentions.append(made)
        return made


def filled(gm: fx.GraphModule, inputs: Sequence[Any], settings: Any) -> Network:
    """The network torch-tensorrt makes of a graph it has lowered. No engine is built: it would be
    loaded into the driver's memory."""
    trt = importlib.import_module("tensorrt_rtx")
    conversion = "torch_tensorrt.dynamo.conversion."
    dtypes = importlib.import_module(conversion + "_conversion").infer_module_output_dtypes(gm)
    interpreter = importlib.import_module(conversion + "_TRTInterpreter").TRTInterpreter(
        gm, inputs, output_dtypes=dtypes, compilation_settings=settings
    )
    interpreter.ctx.net = definition = Listening(interpreter.ctx.net)
    interpreter._construct_trt_network_def()
    constants: dict[str, torch.Tensor] = {}
    for i in range(definition.num_layers):
        layer = definition.get_layer(i)
        layer.name = f"{i} {layer.name}"  # its names are not unique
        if layer.type.name == "CONSTANT":
            layer.__class__ = trt.IConstantLayer
            with torch._subclasses.fake_tensor.unset_fake_temporarily():
                value = torch.from_numpy(layer.weights.copy())
                constants[layer.name] = value.reshape(tuple(layer.shape))
    held = SimpleNamespace(constants=constants, interpreter=interpreter)
    return Network(trt, interpreter.builder, definition, held)  # type: ignore[arg-type]


def of_rank_graph(graph: RankGraph, given: Mapping[str, torch.Tensor]) -> Network:
    """The network torch-tensorrt makes of a rank graph without a cache.

    given: weights and constants by placeholder; they are inputs of the network, as they are when
    torch.compile hands it a graph.
    """
    install()
    package = importlib.import_module("torch_tensorrt")
    lowering = importlib.import_module("torch_tensorrt.dynamo.lowering")
    ports = {port.name: port for port in graph.inputs}
    names = [str(node.target) for node in graph.module.graph.find_nodes(op="placeholder")]
    examples = tuple(example_input(ports[n]) if n in ports else given[n] for n in names)
    dims = {
        name: torch.export.Dim(name, min=extent.minimum, max=extent.maximum)
        for name, extent in graph.symbols.items()
    }
    sizes = tuple(
        {d: dims[s] for d, s in enumerate(ports[n].shape) if isinstance(s, str)}
        if n in ports
        else None
        for n in names
    )
    inputs = []
    for name, tensor in zip(names, examples):
        shape: dict[str, Any] = {"shape": tuple(tensor.shape)}
        if name in ports:
            bounds = shapes_of(graph.symbols, ports[name].shape)
            shape = dict(zip(("min_shape", "opt_shape", "max_shape"), bounds))
        inputs.append((shape, tensor.dtype))
    with without_a_gpu(), torch.no_grad():
        # its converters of collectives do not say that they take dynamic sizes; they do
        settings = package.dynamo.CompilationSettings(assume_dynamic_shape_support=True)
        module = _in_its_words(graph)
        program = torch.export.export(module, examples, dynamic_shapes=sizes)
        program = program.run_decompositions(lowering.get_decompositions(False, False))
        lowered = lowering.post_lowering(program.module(), settings)
        made = [package.Input(**shape, dtype=dtype) for shape, dtype in inputs]
        return filled(lowered, made, settings)


def _in_its_words(graph: RankGraph) -> fx.GraphModule:
    """A rank graph with torch's own attention, and the waits torch-tensorrt looks for."""
    module = copy.deepcopy(graph.module)
    for node in module.graph.find_nodes(op="call_function", target=operators.attention):
        assert not any(node.args[3:]) and node.kwargs["causal"] == operators.UPPER_LEFT
        more = {"scale": node.kwargs["scale"], "enable_gqa": True}
        node.target = aten.scaled_dot_product_attention.default
        node.args, node.kwargs = (*node.args[:3], None, 0.0, True), more
    for node in list(module.graph.nodes):
        if getattr(node.target, "namespace", "") == "_c10d_functional":
            with module.graph.inserting_after(node):
                wait = module.graph.call_function(_c10d.wait_tensor.default, (node,))
            node.replace_all_uses_with(wait)
            wait.args = (node,)
    module.recompile()
    return module


def as_on_a_gpu(gm: fx.GraphModule) -> None:
    """In place: attention as AOTAutograd writes it on a GPU, fp32 and with a mask.

    On the CPU it writes the CPU's kernel, which torch-tensorrt has no converter of.
    """
    cpu = aten._scaled_dot_product_flash_attention_for_cpu.default
    for node in gm.graph.find_nodes(op="call_function", target=cpu):
        mask, causal = node.kwargs.get("attn_mask"), any(node.args[4:5])
        node.target = aten._scaled_dot_product_efficient_attention.default
        node.args = (*node.args[:3], mask, False, 0.0, causal)
        node.kwargs = {"scale": node.kwargs.get("scale")}
    gm.recompile()


@contextmanager
def compiling_to(
    run: Callable[[Network], Callable[..., tuple[torch.Tensor, ...]]],
) -> Iterator[None]:
    """Within, torch-tensorrt's backend of torch.compile ends in `run` of the network of each whole
    graph, instead of in engines of the parts it can convert."""
    install()
    backends = importlib.import_module("torch_tensorrt.dynamo.backend.backends")
    real = backends.post_lowering

    def post_lowering(gm: fx.GraphModule, settings: Any) -> fx.GraphModule:
        as_on_a_gpu(gm)
        return real(gm, settings)

    def compile_module(
        gm: fx.GraphModule, inputs: Sequence[Any], settings: Any, engine_cache: Any
    ) -> fx.GraphModule:
        call = run(filled(gm, inputs, settings))
        graph = fx.Graph()
        names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        graph.output(graph.call_function(call, tuple(map(graph.placeholder, names))))
        return fx.GraphModule({}, graph)

    with (
        without_a_gpu(),
        mock.patch.object(backends, "post_lowering", post_lowering),
        mock.patch.object(backends, "compile_module", compile_module),
    ):
        yield
