"""The private names of torch that this project uses, and whether this torch has them."""

from __future__ import annotations

import contextlib
import functools
import importlib
from typing import Any

import torch

from autoshard.runtime.errors import AutoshardError

MINIMUM, NEWEST = (2, 11), (2, 14)
"""The releases that were tried; pyproject.toml allows one more, whose names are probed."""

PRIVATE = """
torch.Tensor._backward_hooks
torch.Tensor._make_wrapper_subclass
torch.Tensor._post_accumulate_grad_hooks
torch.Tensor._use_count
torch.Tensor._version
torch._check
torch._C.DisableTorchFunctionSubclass
torch._C._DisableAutocast
torch._C._are_functorch_transforms_active
torch._C._autograd._saved_tensors_hooks_disable
torch._C._autograd._saved_tensors_hooks_enable
torch._C._current_autograd_node
torch._C._current_graph_task_id
torch._C._dispatch_has_kernel_for_dispatch_key
torch._C._distributed_c10d.Backend._end_coalescing
torch._C._distributed_c10d.Backend._start_coalescing
torch._C._distributed_c10d._create_work_from_future
torch._C._distributed_c10d._register_process_group
torch._C._distributed_c10d._resolve_process_group
torch._C._distributed_c10d._unregister_process_group
torch.distributed._symmetric_memory.get_symm_mem_workspace
torch._C._dynamo.eval_frame.set_code_exec_strategy
torch._C._functions.AccumulateGrad
torch._C._functorch.is_functorch_wrapped_tensor
torch._C._functorch.is_legacy_batchedtensor
torch._C._is_any_autocast_enabled
torch._C._set_grad_enabled
torch._C._will_engine_execute_node
torch._decomp.decompositions.one_layer_lstm
torch._decomp.decompositions.select_one_layer_lstm_function
torch._dispatch.python.enable_python_dispatcher
torch._dynamo.OptimizedModule
torch._dynamo.config.allow_rnn
torch._dynamo.eval_frame._TorchDynamoContext
torch._dynamo.exc.TensorifyScalarRestartAnalysis
torch._dynamo.exc.TorchDynamoException
torch._dynamo.exc.UnspecializeRestartAnalysis
torch._dynamo.exc.exceptions_allowed_to_be_fallback
torch._dynamo.exc.unimplemented
torch._dynamo.guards.GuardBuilder
torch._dynamo.guards.get_verbose_code_parts
torch._dynamo.lookup_backend
torch._dynamo.mark_dynamic
torch._dynamo.symbolic_convert.InstructionTranslator.current_tx
torch._dynamo.symbolic_convert.TensorifyState
torch._dynamo.source.AttrSource
torch._dynamo.source.TypeSource
torch._dynamo.types.FrameAction
torch._dynamo.types.FrameExecStrategy
torch._dynamo.variables.SetVariable
torch._dynamo.variables.base.VariableTracker
torch._dynamo.variables.builder.VariableBuilder.wrap_module
torch._dynamo.variables.builder.VariableBuilder.wrap_tensor
torch._dynamo.variables.builder.wrap_fx_proxy
torch._dynamo.variables.builtin.BuiltinVariable
torch._dynamo.variables.lazy.LazyVariableTracker
torch._dynamo.variables.tensor.TensorVariable.method_attr_data
torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack
torch._functionalize_has_data_mutation
torch._guards.CompileContext.current_compile_id
torch._guards.Guard
torch._guards.TracingContext.try_get
torch._logging.trace_structured
torch._subclasses.fake_tensor.FakeTensor
torch._subclasses.fake_tensor.FakeTensorMode
torch._subclasses.functional_tensor.FunctionalTensor
torch._subclasses.functional_tensor.FunctionalTensorMode
torch.amp.autocast_mode._enter_autocast
torch.amp.autocast_mode._exit_autocast
torch.autograd.grad_mode._enter_inference_mode
torch.autograd.grad_mode._exit_inference_mode
torch.autograd.Variable._execution_engine
torch.distributed.ProcessGroup._device_types
torch.distributed.ProcessGroup._get_backend
torch.distributed.distributed_c10d._set_pg_timeout
torch.distributed.tensor.DTensor._local_tensor
torch.distributed.tensor._dtensor_spec.DTensorSpec
torch.distributed.tensor._dtensor_spec.TensorMeta
torch.distributed.tensor._ops._math_ops._NormPartial
torch.distributed.tensor.DTensor._spec
torch.distributed.tensor.placement_types._StridedShard
torch.fx._lazy_graph_module._LazyGraphModule
torch.multiprocessing.reductions.StorageWeakRef
torch.nn.Module._call_impl
torch.nn.parallel.DistributedDataParallel._get_active_ddp_module
torch.ops._c10d_functional
torch.utils._foreach_utils._foreach_supported_types
torch.utils._python_dispatch.TorchDispatchMode
torch.utils._python_dispatch._disable_current_modes
torch.utils._python_dispatch.is_traceable_wrapper_subclass
torch.utils._pytree
""".split()
"""Every private name that the files of this folder use, those of compilers excepted. What they ask
for with a default, because some versions lack it, is not here."""

COMPILERS = """
torch._dynamo.backends.common.aot_autograd
torch._dynamo.backends.debugging.boxed_nop
torch._dynamo.config
torch._dynamo.utils.GmWrapper
torch._functorch._aot_autograd.graph_compile._log_fw_bw_graphs
torch._functorch._aot_autograd.graph_compile._log_joint_graph
torch._functorch._aot_autograd.graph_compile.aot_graphs_log
torch._functorch._aot_autograd.graph_compile.aot_joint_log
torch._functorch.aot_autograd.aot_module_simplified
torch._functorch.config
torch._functorch.partitioners.functionalize_rng_ops
torch._functorch.partitioners.has_recomputable_rng_ops
torch._functorch.partitioners.min_cut_rematerialization_partition
torch._functorch.partitioners.must_recompute
torch._guards.TracingContext
torch._guards.detect_fake_mode
torch._guards.tracing
torch._inductor.codecache.CppPythonBindingsCodeCache
torch._inductor.codecache.CppWrapperCodeCache
torch._inductor.codecache.FxGraphCachePickler.debug_lines
torch._inductor.codecache.LOCK_TIMEOUT
torch._inductor.codecache._precompile_header
torch._inductor.codecache.cache_dir
torch._inductor.codecache.get_lock_dir
torch._inductor.codecache.get_path
torch._inductor.codecache.log
torch._inductor.codecache.write_atomic
torch._inductor.compile_fx._recursive_post_grad_passes
torch._inductor.compile_fx.compile_fx
torch._inductor.compile_fx.compile_fx_inner
torch._inductor.compile_fx.fake_tensor_prop
torch._inductor.compile_fx.fx_codegen_and_compile
torch._inductor.compile_fx.get_input_idxs_to_check
torch._inductor.compile_fx.record_original_output_strides
torch._inductor.compile_fx.wrap_compiler_debug
torch._inductor.config
torch._inductor.custom_graph_pass.CustomGraphPass
torch._inductor.custom_graph_pass.CustomPartitionerFn
torch._inductor.custom_graph_pass.get_hash_for_files
torch._inductor.debug.DebugContext
torch._inductor.dependencies.StarDep
torch._inductor.dependencies.WeakDep
torch._inductor.dtype_propagation.DtypePropagationOpsHandler
torch._inductor.fx_passes.control_dependencies.preserve_node_ordering
torch._inductor.fx_passes.post_grad.view_to_reshape
torch._inductor.graph.GraphLowering
torch._inductor.ir
torch._inductor.list_mode_options
torch._inductor.output_code.CompiledFxGraph
torch._inductor.pattern_matcher.fwd_only
torch._inductor.pattern_matcher.stable_topological_sort
torch._inductor.scheduler.SchedulerNode.recompute_size_and_body
torch._inductor.utils.BoxedBool
torch._inductor.utils.fresh_cache
torch._inductor.utils.op_dtype_propagation_rules
torch._inductor.utils.set_tracing_context_output_strides
torch._inductor.virtualized.V
torch.compiler._cache.CacheArtifact
torch.compiler._cache.CacheArtifactFactory
torch.compiler._cache.CacheArtifactManager
torch.utils._filelock.FileLock
torch.utils._ordered_set.OrderedSet
""".split()
"""Private names that are imported with a compiler, at the first graph: it takes seconds."""

TRANSFERS = """
torch._functorch._activation_offloading.offload_ops.offload
torch._functorch._activation_offloading.offload_ops.reload
torch._functorch._activation_offloading.offload_ops.wait_tensor
""".split()
"""Private names that GPUs use where values are kept on the host; torch 2.11 lacks them."""


_TRIED = "Install torch {}.{} to {}.{}, the releases that autoshard was tried with.".format(
    *MINIMUM, *NEWEST
)


def probe(names: list[str] = PRIVATE) -> None:
    """Raise AutoshardError where this torch is too old, or lacks one of `names`."""
    if tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) < MINIMUM:
        raise AutoshardError(f"torch {torch.__version__} is too old", remedy=_TRIED)
    missing = [name for name in names if not _exists(name)]
    if missing:
        raise AutoshardError(
            f"torch {torch.__version__} has no {', '.join(missing)}", remedy=_TRIED
        )


@functools.cache
def probe_compilers() -> None:
    """`probe` of the names that compile graphs."""
    probe(COMPILERS)


def _exists(name: str) -> bool:
    found: Any = torch
    path, *parts = name.split(".")
    for part in parts:
        path = f"{path}.{part}"
        if not hasattr(found, part):
            with contextlib.suppress(ImportError):
                importlib.import_module(path)
        found = getattr(found, part, None)
    return found is not None


# At import, and the first module that the folder's door imports: the other files would fail with
# the ImportError of one name.
probe()
