"""Everything that touches torch's and transformers' private parts, each with its reason."""

from __future__ import annotations

from autoshard.runtime.compat.version import probe  # first: it says by name what is missing

# isort: split
from autoshard.runtime.compat.aot import (
    AFTER_CUT,
    Finish,
    ForwardBackward,
    JointGraph,
    aot_eager,
    forward_backward,
    memory_of,
)
from autoshard.runtime.compat.autograd import (
    AccumulateGrad,
    after_backward,
    apply,
    around_backward,
    compiled_node,
    drop_accumulated_hooks,
    first_leaf,
    has_accumulated_hooks,
    in_backward,
    in_transform,
    is_in_a_graph,
    leaves,
    move_hooks,
    only_stores,
    outside_transforms,
    transforming,
    will_run,
)
from autoshard.runtime.compat.compiled_modules import (
    parametrized_class,
    parametrized_subclass,
    replace,
    watch_compiles,
)
from autoshard.runtime.compat.dynamo import (
    ONLY_IN_OURS,
    READ_WHOLE,
    lighten_guards,
    specialize_floats,
    trace_as_ours,
    traced_as_ours,
)
from autoshard.runtime.compat.frames import (
    RESTARTS,
    GraphInput,
    RestartTrace,
    TraceError,
    allow_in_graph,
    artifact,
    backend_error,
    backend_fakes,
    called_from,
    compiled_code,
    compiling,
    graph_inputs,
    mark_dynamic,
    never_a_frame,
    not_traced,
    registered_backend,
    running_ddp,
)
from autoshard.runtime.compat.groups import (
    OwnSums,
    gather_matmul,
    gpu_milliseconds,
    group_limit,
    has_lost_a_rank,
    has_symmetric_memory,
    host_group,
    is_capturing,
    is_of_a_collective,
    matmul_scatter,
    misses_a_rank,
    name_group,
    once_a_world,
    process_group,
    replace_group,
    set_group_limit,
)
from autoshard.runtime.compat.inductor import (
    DECOMPOSITIONS,
    cuda_graphs_are_set,
    inductor_compile,
    inductor_settings,
    mode_settings,
)
from autoshard.runtime.compat.inductor_memory import (
    ON_HOST,
    InductorGraph,
    InductorStep,
    inductor_step,
)
from autoshard.runtime.compat.modes import (
    ENTER_AUTOCAST,
    ENTER_INFERENCE,
    EXIT_AUTOCAST,
    EXIT_INFERENCE,
    GET_DATA,
    SAVED_TENSOR_HOOKS,
    SET_GRAD,
    autocast_is_on,
    autocast_knows,
    explicit_modes,
    meta_constants,
    real_tensors,
)
from autoshard.runtime.compat.symbolic import (
    FakeTensor,
    FakeTensorMode,
    FunctionalTensor,
    FunctionalTensorMode,
    is_traceable_wrapper_subclass,
    same_storage,
    size_at,
    size_expression,
    size_hint,
    size_symbols,
    storage_key,
    symbol_places,
    unknown_size,
)
from autoshard.runtime.compat.tensors import (
    detached_locals,
    dtensor_like,
    has_data_mutation,
    is_static_address,
    local_of,
    marked_parameter,
    nccl_communicator,
    placement_dim,
    plain_attributes,
    set_stored,
    shard_placement,
    shards,
    share_spec,
    spec_of,
    transfers,
    version_of,
    wrapper_tensor,
    writes_to,
)
from autoshard.runtime.compat.transformers import (
    apply_gate,
    choose_causal_loss,
    initialiser_of,
    prepare_recording,
    published,
    run_experts_by,
    turn_off_cache,
    uses_cache,
)
