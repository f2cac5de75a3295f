"""Programs of models on fake CUDA devices, and what of them waits for the host: run in a process of
its own, which prints JSON.

    python cuda_programs.py NAME ...
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import cuda_stand_in

if __name__ == "__main__":
    cuda_stand_in.load()

import torch
from torch import fx, nn

import autoshard
from autoshard import tracing
from autoshard.compiling import any_rank, compile_local, not_captured, rank_settings
from autoshard.program import Program
from autoshard.runtime import compat
from autoshard.runtime.collectives import Axis, S
from autoshard.runtime.lazy_gather import lazy

torch.cuda.get_device_capability = lambda device=None: (9, 0)  # transformers asks

aten = torch.ops.aten
MODE = compat.FakeTensorMode()
BATCH, SEQUENCE = 2, 64

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
GPT2: dict[str, Any] = {"vocab_size": 256, "n_embd": 128, "n_layer": 2, "n_head": 4}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}

#: One layer that is large enough for collectives to be fused with products.
WIDE = {
    **{"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008},
    **{"num_hidden_layers": 1, "num_attention_heads": 32},
}

#: Operators whose result the host reads, or whose shape it has to know: it waits for the device.
READ_BY_HOST = {
    aten._local_scalar_dense.default,
    aten.item.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.equal.default,
    aten.is_nonzero.default,
}
COPIES = {
    aten._to_copy.default,
    aten.copy.default,
    aten.copy_.default,
    torch.ops.prims.device_put.default,
}


def model_of(name: str, dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> nn.Module:
    """A model of transformers whose parameters and buffers are fakes on the first GPU."""
    import transformers

    made = getattr(transformers, name)
    with torch.device("meta"):
        model: nn.Module = made(made.config_class(**sizes)).to(dtype)
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for key, value in held.items():
                if value is not None:
                    new = on_gpu(value.shape, value.dtype)
                    held[key] = nn.Parameter(new) if held is module._parameters else new
    compat.choose_causal_loss(model)
    return model


def on_gpu(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """A fake tensor on the first GPU."""
    with MODE:
        return torch.empty(tuple(shape), dtype=dtype, device="cuda:0")


def step(
    model: nn.Module, mesh: dict[str, int], shape: Any = (BATCH, SEQUENCE), **options: Any
) -> Program:
    """The program of a training step."""
    ids = on_gpu(shape, torch.long)
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    return autoshard.trace(model, (), batch, mesh=mesh, cuda_graphs=True, **options)


def packed(model: nn.Module, mesh: dict[str, int]) -> Program:
    """The program of a training step with documents one behind the other."""
    ids = on_gpu((BATCH, SEQUENCE), torch.long)
    batch = {"input_ids": ids, "labels": ids, "position_ids": ids, "use_cache": False}
    return autoshard.trace(model, (), batch, mesh=mesh, cuda_graphs=True)


def decode_step(model: nn.Module, n: int) -> Program:
    """The program of one token with a static cache that is split by heads already."""
    from transformers import StaticCache

    config: Any = model.config
    with MODE:
        cache = StaticCache(config=config, max_cache_len=SEQUENCE)
    heads, width = config.num_key_value_heads // n, config.hidden_size // config.num_attention_heads
    axis = Axis("tp", n, 0, "offline:tp")
    for layer in cache.layers:
        part = on_gpu((BATCH, heads, SEQUENCE, width), torch.bfloat16)
        with MODE:
            layer.lazy_initialization(part, part)
        layer.keys, layer.values = (lazy(on_gpu(part.shape, part.dtype), S(1), axis) for _ in "kv")
    inputs = {"input_ids": on_gpu((BATCH, 1), torch.long), "past_key_values": cache}
    with torch.no_grad():
        return autoshard.trace(model, (), inputs, mesh={"tp": n}, cuda_graphs=True)


def prompt(model: nn.Module) -> Program:
    """The program that makes a cache."""
    inputs = {"input_ids": on_gpu((BATCH, SEQUENCE), torch.long), "use_cache": True}
    with torch.no_grad():
        return autoshard.trace(model, (), inputs, mesh={"tp": 2}, cuda_graphs=True)


CASES: dict[str, Callable[[], Program]] = {
    "llama": lambda: step(model_of("LlamaForCausalLM", **SIZES).train(), {"tp": 2}),
    "llama_wide": lambda: step(
        model_of("LlamaForCausalLM", **WIDE).train(),
        {"tp": 8},
        shape=(1, 4096),
        planner={"fuse_collectives": "auto"},
    ),
    "llama_fsdp": lambda: step(
        model_of("LlamaForCausalLM", torch.float32, **SIZES).train(),
        {"dp_shard": 2, "tp": 2},
        precision={"param": torch.bfloat16},
    ),
    "gpt2_dropout": lambda: step(model_of("GPT2LMHeadModel", **GPT2).train(), {"tp": 2}),
    "mixtral": lambda: step(model_of("MixtralForCausalLM", **SIZES, **EXPERTS).train(), {"tp": 2}),
    "mixtral_ep": lambda: step(
        model_of("MixtralForCausalLM", **SIZES, **EXPERTS).train(),
        {"ep": 2},
        planner={"ep_exchange": "rows"},
    ),
    "gemma3_packed": lambda: packed(
        model_of("Gemma3ForCausalLM", **{**SIZES, **WINDOWS}).train(), {"tp": 2}
    ),
    "prompt": lambda: prompt(model_of("LlamaForCausalLM", **SIZES).eval().requires_grad_(False)),
    "decode": lambda: decode_step(
        model_of("LlamaForCausalLM", **SIZES).eval().requires_grad_(False), 2
    ),
}


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """The fakes that a node gives."""
    val = node.meta.get("val")
    found = val if isinstance(val, (tuple, list)) else [val]
    return [one for one in found if isinstance(one, torch.Tensor)]


def waits(graph: fx.Graph) -> Iterator[str]:
    """What of a graph the host waits for, or moves between devices."""
    for node in graph.nodes:
        if node.target in READ_BY_HOST:
            yield f"{node.target} is read by the host"
        if any(one.device.type != "cuda" for one in tensors_of(node)):
            yield f"{node.target} is on {tensors_of(node)[0].device}"
        if node.op == "get_attr":
            yield f"{node.target} is a constant, which is copied to the device"
        sources = [one for source in node.all_input_nodes for one in tensors_of(source)]
        made = tensors_of(node)
        if node.target in COPIES and made and any(one.device != made[0].device for one in sources):
            yield f"{node.target} copies between devices"
        if _unknown(made) and not _unknown(sources):
            yield f"{node.target} has a shape that is known when it has run"


def _unknown(tensors: list[torch.Tensor]) -> bool:
    return any(not isinstance(size, int) for one in tensors for size in one.shape)


def facts(program: Program) -> list[dict[str, Any]]:
    """Of the forward, and of the backward where there is one."""
    found = []
    for gm in (program.running.forward, program.running.backward):
        if gm is None:
            continue
        calls = [node for node in gm.graph.nodes if node.op == "call_function"]
        inputs = gm.graph.find_nodes(op="placeholder")
        products = [node for node in calls if node.target in (aten.mm.default, aten.bmm.default)]
        found.append(
            {
                "waits": sorted(waits(gm.graph)),
                "operators": Counter(str(node.target) for node in calls),
                "cloned_inputs": sum(
                    node.target is aten.clone.default and node.args[0] in inputs for node in calls
                ),
                "masks": sum(
                    one.dtype == torch.bool and one.shape[-2:] == (SEQUENCE, SEQUENCE)
                    for node in calls
                    for one in tensors_of(node)
                ),
                "product_dtypes": sorted({str(tensors_of(node)[0].dtype) for node in products}),
            }
        )
    return found


def traced(name: str) -> tuple[Program, list[compat.GraphInput]]:
    """A case's program, and the inputs that Dynamo gave its graph."""
    found: list[Any] = []
    build = tracing.build_program

    def keep(gm: fx.GraphModule, example: Any, inputs: list[Any], *rest: Any, **more: Any) -> Any:
        found.append(inputs)
        return build(gm, example, inputs, *rest, **more)

    with mock.patch.object(tracing, "build_program", keep):
        return CASES[name](), found[-1]


def captures(program: Program, inputs: Sequence[compat.GraphInput]) -> dict[str, Any]:
    """Why a program is no CUDA graph, and what Inductor is told of its forward and its backward.

    asked: it shall capture them. copied: the inputs that it is not told to find where they lay.
    written: those that the graph writes to. around: operators that it leaves out.
    """
    from torch._inductor import compile_fx, config, utils

    found: list[dict[str, Any]] = []

    def inner(gm: fx.GraphModule, example: Any, **options: Any) -> Any:
        placeholders = gm.graph.find_nodes(op="placeholder")
        names = [node.name for node in placeholders]
        if not options.get("is_backward"):
            own = names[: len(names) - len(inputs)]  # of the graph, which come first
            assert all("rank_of" in str(node.meta["desc"]) for node in placeholders[: len(own)])
            names = [*own, *(item.name for item in inputs)]
        moving = set(range(len(names))) - set(options["static_input_idxs"])
        written = {
            names[placeholders.index(node.args[0])]
            for node in gm.graph.find_nodes(op="call_function", target=aten.copy_.default)
        }
        found.append(
            {
                "asked": config.triton.cudagraphs,
                "copied": sorted(names[i] for i in moving),
                "written": sorted(written),
                "around": sorted(
                    str(node.target)
                    for node in gm.graph.nodes
                    if node.op == "call_function" and utils.is_cudagraph_unsafe_fx_node(node)
                ),
            }
        )
        return _read_only

    local = program.graph_module
    fakes = [node.meta["val"] for node in local.graph.find_nodes(op="placeholder")]

    def number_on(device: torch.device, number: int) -> torch.Tensor:
        with fakes[0].fake_mode:  # there is no such device
            return torch.tensor(number, device=device)

    with (
        mock.patch.object(any_rank, "number_on", number_on),
        mock.patch.object(compile_fx, "compile_fx_inner", inner),
        torch._functorch.config.patch(
            enable_autograd_cache=False, force_non_lazy_backward_lowering=True
        ),
        config.patch(joint_graph_constant_folding=False),  # computes them, on the device
    ):
        settings = rank_settings(program, inputs)
        compile_local(local, fakes, "inductor", program.finish, "", settings)
    return {"reason": not_captured(program), "captured": found}


def _read_only(*args: Any) -> Any:
    raise AssertionError("made to be read, not to be run")


_read_only._boxed_call = True  # type: ignore[attr-defined]


if __name__ == "__main__":
    made = {name: traced(name) for name in sys.argv[1:]}
    told = {name: {"graphs": facts(made[name][0]), **captures(*made[name])} for name in made}
    print(json.dumps(told), flush=True)
    os._exit(0)  # without joining autograd's threads, which the stand-in does not know
