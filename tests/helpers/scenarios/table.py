"""The list of scenarios: what a person does, and the function that does it.

Each function is run twice, on the serial model and on the compiled one, and what it records is
compared (`job.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from scenarios import (
    calls,
    compiled,
    copies,
    derivatives,
    habits,
    libraries,
    methods,
    optimizers,
    partly_compiled,
    reads,
    surgery,
    wrappers,
    writes,
)
from scenarios.job import Job
from scenarios.optimizers import OPTIMIZERS, steps_of
from scenarios.surgery import around_the_first_call
from scenarios.writes import between_steps

Scenario = Callable[[Job], None]

WRITES: dict[str, Scenario] = {
    "weight.data.clamp_": between_steps(writes.data_clamp),
    "weight.data.mul_": between_steps(writes.data_mul),
    "weight.data[0] =": between_steps(writes.data_row),
    "weight.data[a:b, ::c] =": between_steps(writes.data_slice),
    "weight.data[mask] =": between_steps(writes.data_mask),
    "weight.data.copy_": between_steps(writes.data_copy),
    "weight.data =": between_steps(writes.data_assigned),
    "weight.data = normalize(weight.data)": between_steps(writes.data_divided),
    "no_grad: clamp_, add_, *=": between_steps(writes.no_grad_clamp),
    "no_grad: weight[1:3] =": between_steps(writes.no_grad_slice),
    "no_grad: copy_, fill_": between_steps(writes.no_grad_copy),
    "no_grad: through views": between_steps(writes.no_grad_view),
    "no_grad: uniform_, normal_": between_steps(writes.no_grad_uniform),
    "weight.detach().mul_": between_steps(writes.detached),
    "mul(..., out=weight)": between_steps(writes.with_out),
    "renorm": between_steps(writes.norm_limited),
    "every nn.init": writes.every_init,
    "reset_parameters": between_steps(writes.reset_parameters),
    "model.apply(init)": between_steps(writes.apply_init),
    "model.apply(_init_weights)": between_steps(writes.transformers_init),
    "writes before the first call": writes.written_before,
    "weights clamped after each step": writes.clamped_each_step,
    "module.bias = Parameter": between_steps(writes.set_parameter),
    "module.weight = Parameter, module = Module": writes.new_parameter,
    "module.bias = None": writes.deleted_parameter,
}

READS: dict[str, Scenario] = {
    "module.weight is the parameter": reads.one_object,
    "parameter groups by identity": reads.identity_in_sets,
    "weight.grad": reads.gradient_attribute,
    "norms and histograms for a log": reads.norms_for_a_log,
    "item, tolist, numpy, repr": reads.values_out,
    "eager mathematics with plain tensors": reads.eager_mathematics,
    "eager forward of parts": reads.eager_forward,
    "register_hook": reads.gradient_hooks,
    "register_post_accumulate_grad_hook": reads.accumulated_hooks,
    "hooks of modules": reads.module_hooks,
    "autograd.grad": reads.autograd_grad,
    "clip_grad_norm_, clip_grad_value_": reads.clipping,
    "gradients changed by hand": reads.noise_on_gradients,
}

TRAINING: dict[str, Scenario] = {
    **{name: steps_of(make) for name, make in OPTIMIZERS.items()},
    "Muon": optimizers.muon,
    "Adafactor made after the first call": steps_of(OPTIMIZERS["Adafactor"], made="after"),
    "LBFGS whose closure makes the first call": optimizers.lbfgs,
    "SAM": optimizers.sam,
    "L2 and L1 over parameters() beside the loss": optimizers.penalty,
    "distance from the first weights (EWC)": optimizers.anchored,
    "parameters_to_vector, vector_to_parameters": optimizers.vectors,
    "optimizer in backward": optimizers.in_backward,
    "GradScaler": optimizers.scaler,
    "schedulers and late parameter groups": optimizers.schedules,
    "Lookahead": optimizers.lookahead,
    "states on the host": optimizers.taken_over("offload_optimizer"),
    "steps on parts": optimizers.taken_over("optimizer"),
    "Embedding(sparse=True)": optimizers.sparse_embedding,
    "Embedding(max_norm=1)": optimizers.bounded_embedding,
    "a compiled step of an optimizer": compiled.optimizer_step,
    "a compiled update of parameter, gradient and state": compiled.update_of_parts,
    "compiled functions that leave the graph": compiled.broken_graphs,
}

DERIVATIVES: dict[str, Scenario] = {
    "gradient penalties": derivatives.gradient_penalties,
    "products with the Hessian": derivatives.hessian_products,
    "gradient penalties, inner=eager": derivatives.recorded_by_autograd,
    "torch.func over a stored model": derivatives.transforms,
    "torch.func over parameters, in a graph": derivatives.transforms_in_a_graph,
    "autograd.grad in several ways": derivatives.several_ways,
}

COPIES: dict[str, Scenario] = {
    "AveragedModel": copies.averaged,
    "EMA by hand": copies.averaged_by_hand,
    "EMA of a deep copy": copies.ema_of_a_copy,
    "momentum copies (MoCo)": writes.momentum_copies,
    "momentum copies in forward": writes.momentum_in_forward,
    "deepcopy": copies.deep_copies,
    "copies of parameters": copies.copied_tensors,
    "pickle and torch.save of a model": copies.pickled,
    "state dict files": copies.state_dict_files,
    "torch.save(state_dict()) of each rank": copies.own_state_dict,
    "load_state_dict of plain values": copies.state_dicts,
    "values between models": copies.values_between_models,
    "save_pretrained, from_pretrained": surgery.pretrained,
    "PEFT: save_pretrained, from_pretrained": surgery.adapters_saved,
}

SURGERY: dict[str, Scenario] = {
    "weight_norm": around_the_first_call(surgery.weight_norm, surgery.no_parametrization),
    "spectral_norm": around_the_first_call(surgery.spectral_norm, surgery.no_parametrization),
    "orthogonal": around_the_first_call(surgery.orthogonal, surgery.no_parametrization),
    "LoRA by parametrize": around_the_first_call(surgery.low_rank, surgery.no_parametrization),
    "LoRA by parametrize, dropped": around_the_first_call(surgery.low_rank, surgery.no_low_rank),
    "weight_norm by hooks": around_the_first_call(
        surgery.old_weight_norm, surgery.no_old_weight_norm
    ),
    "prune": around_the_first_call(surgery.pruned, surgery.pruned_for_good),
    "prune globally": around_the_first_call(surgery.pruned_globally),
    "layers frozen": around_the_first_call(surgery.frozen, surgery.thawed),
    "a parametrization on and off in forward": surgery.parametrized_in_forward,
    "frozen below a live view": surgery.frozen_below_a_view,
    "layers frozen and thawed between steps": surgery.frozen_between_steps,
    "double, bfloat16, half": surgery.cast,
    "weights tied later": surgery.tied_later,
    "modules shared by two models": surgery.shared_modules,
    "layers added and removed": surgery.grown,
    "resize_token_embeddings": surgery.resized,
    "PEFT: LoRA, merge_and_unload": surgery.adapted("before"),
    "PEFT: LoRA added after the first call": surgery.adapted("after"),
}

CALLS: dict[str, Scenario] = {
    "functional_call": calls.functional,
    "stateless, MAML": calls.stateless,
    "vmap(grad(functional_call)) inside": calls.per_sample,
    "a weight written to outside of the graph": calls.written_outside,
    "a weight made between two graphs": calls.made_between_graphs,
    "AdaptiveLogSoftmaxWithLoss": calls.adaptive_softmax,
    "gradient checkpointing": calls.checkpointed,
    "complex slice assignment (FNO)": calls.spectral,
    "mixture with torch.where": calls.mixture("where"),
    "mixture, dynamo.disable": calls.mixture("disabled"),
    "mixture, generator": calls.mixture("generated"),
    "mixture, try/finally in a context": calls.mixture("in_a_context"),
    "forward disabled": calls.whole_model_disabled,
    "mixture by Module.compile": calls.mixture("disabled", calls.module_compiled),
    "mixture in a compiled function": calls.mixture("disabled", calls.function_compiled),
    "autocast": wrappers.autocast,
    "DDP around": wrappers.ddp_around,
    "DDP inside": wrappers.ddp_inside,
    "DDP of a stored model": wrappers.ddp_of_a_stored_model,
    "fully_shard inside": wrappers.fully_sharded,
    "fully_shard of a stored model": wrappers.fully_shard_of_a_stored_model,
    "hooks on each parameter": wrappers.own_hook,
    "nn.DataParallel around": wrappers.data_parallel_threads,
}

METHODS: dict[str, Scenario] = {
    "methods: actor-critic": methods.actor_critic,
    "methods: a regularizer before the first call": methods.regularizer_first,
    "methods: encode, decode": methods.encoder_decoder,
    "methods: a loss": methods.whole_loss,
    "methods: training_step": methods.training_step,
    "methods: one that is disabled": methods.untraced("hidden"),
    "methods: a graph break": methods.untraced("broken"),
    "methods: generate of one's own": methods.generation,
    "methods: a loop over time": methods.recurrence,
    "the model itself in place of the compiled one": partly_compiled.uncompiled,
    "torch.compile disabled, methods beside model.compile()": partly_compiled.unreached,
    "the model itself for the first microbatch": partly_compiled.gradients_before,
    "only a part is compiled": partly_compiled.parts,
    "a part of the compiled model": partly_compiled.part_of_the_compiled,
    "a head beside the compiled model": partly_compiled.beside,
    "a queue of keys": partly_compiled.queue_of_keys,
    "two encoders, one of them frozen": partly_compiled.two_encoders,
}

HABITS: dict[str, Scenario] = {
    "SWA: SWALR, weights taken over": habits.stochastic_averaging,
    "zero_grad(set_to_none=False)": habits.zeroed_gradients,
    "hooks of the state dict": habits.state_hooks,
    "copy.copy of a model": habits.shallow_copies,
    "copy.copy after model.compile()": habits.shallow_copy_of_compiled,
    "an optimizer pickled, alone and with its model": habits.optimizer_pickled,
    "add_param_group of thawed layers": habits.late_groups,
    "half() of a copy, its values taken back": habits.half_and_back,
    "share_memory, to, cpu, eval": habits.moved,
    "profiler, anomaly detection, save_on_cpu": habits.profiled,
    "torch.func by the stored parameters": habits.functional_training,
    "torch.export after the first call": habits.exported,
    "statistics logged in each step": habits.read_between,
    "a module converted in forward": habits.converted,
}

SCENARIOS: dict[str, Scenario] = {
    **WRITES,
    **READS,
    **TRAINING,
    **DERIVATIVES,
    **COPIES,
    **SURGERY,
    **CALLS,
    **METHODS,
    **HABITS,
}

LIBRARIES: dict[str, Scenario] = {
    "accelerate": libraries.accelerated,
    "lightning": libraries.lightning_fit,
    "timm: ModelEmaV3": libraries.timm_ema,
    "trl: SFTTrainer": libraries.supervised,
    "trl: DPOTrainer, a reference model": libraries.preferred,
}

#: Scenario of a library -> the modules it needs.
NEEDED: dict[str, tuple[str, ...]] = {
    "accelerate": ("accelerate",),
    "lightning": ("lightning",),
    "timm: ModelEmaV3": ("timm", "torchvision"),
    "trl: SFTTrainer": ("trl", "datasets"),
    "trl: DPOTrainer, a reference model": ("trl", "datasets"),
}

#: Scenarios of the quick suite, on tp and on dp_shard; the slow one has all.
QUICK = (
    "weight.data.clamp_",
    "weight.data[a:b, ::c] =",
    "weight.data =",
    "no_grad: clamp_, add_, *=",
    "no_grad: through views",
    "no_grad: uniform_, normal_",
    "every nn.init",
    "reset_parameters",
    "model.apply(init)",
    "module.bias = Parameter",
    "module.weight is the parameter",
    "weight.grad",
    "norms and histograms for a log",
    "item, tolist, numpy, repr",
    "eager mathematics with plain tensors",
    "register_hook",
    "clip_grad_norm_, clip_grad_value_",
    "SGD momentum",
    "Adafactor",
    "LBFGS whose closure makes the first call",
    "states on the host",
    "SAM",
    "L2 and L1 over parameters() beside the loss",
    "parameters_to_vector, vector_to_parameters",
    "optimizer in backward",
    "GradScaler",
    "a compiled step of an optimizer",
    "a compiled update of parameter, gradient and state",
    "gradient penalties",
    "AveragedModel",
    "deepcopy",
    "state dict files",
    "load_state_dict of plain values",
    "a parametrization on and off in forward",
    "frozen below a live view",
    "layers frozen and thawed between steps",
    "prune",
    "weights tied later",
    "functional_call",
    "mixture with torch.where",
    "mixture, dynamo.disable",
    "methods: actor-critic",
    "only a part is compiled",
    "the model itself in place of the compiled one",
    "steps on parts",
)

#: Scenarios that are also run under Inductor, and on four ranks, dp_shard with tp.
FURTHER = (
    "weight.data[a:b, ::c] =",
    "every nn.init",
    "weight.grad",
    "register_hook",
    "Adafactor",
    "L2 and L1 over parameters() beside the loss",
    "optimizer in backward",
    "gradient penalties",
    "Embedding(sparse=True)",
    "deepcopy",
    "weight_norm",
    "mixture with torch.where",
    "two encoders, one of them frozen",
    "a queue of keys",
)

ON_STAGES = (
    "a compiled update of parameter, gradient and state",
    "products with the Hessian",
    "stateless, MAML",
    "L2 and L1 over parameters() beside the loss",
    "gradient penalties",
    "autograd.grad in several ways",
    "momentum copies in forward",
    "a weight made between two graphs",
)
"""Those that find what is particular to a parameter that one stage of a pipeline stores."""

BESIDE_STAGES = (
    "weight.data[a:b, ::c] =",
    "weight.data =",
    "no_grad: uniform_, normal_",
    "SWA: SWALR, weights taken over",
    "hooks of the state dict",
)
"""Those of four ranks, on which a stage's parameters are split, too."""

_NOT_ON_STAGES = {
    "Embedding(max_norm=1)": "a write to a parameter in forward",
    "gradient penalties, inner=eager": "a second derivative through a pipeline",
    "torch.func over parameters, in a graph": "a scalar between two graphs is taken for the loss",
    "methods: training_step": "a number that changes",
}
"""Errors on pp, with what they are of."""

WITH_STAGES = tuple(name for name in SCENARIOS if name not in _NOT_ON_STAGES)
