"""Rows of matrices that CI leaves out: `make test-exhaustive` runs them, an hour and a half.

CI runs a row's neighbours: the same code, another model or mesh. Run these before a release, and
after a change to what one is about (`make test-exhaustive ARGS="-k mixture"`).
"""

from __future__ import annotations

import re

#: What a test's id begins with, after `tests/`. `training/test_scenarios.py` marks its own.
ROWS = (
    r"building/test_composed_pipelines\.py::test_data_parallel_stages\[(llama-sizes1|gpt2-sizes2)",
    r"building/test_composed_pipelines\.py::test_checkpoints_of_sharded_stages\[first1",
    r"building/test_composed_pipelines\.py::test_what_eager_code_reads_and_writes_of_shards\[sizes1",
    r"building/test_pipeline_precision\.py::test_other_schedules_and_axes\[sizes[02]",
    r"building/test_pipelined_training\.py::test_other_models_and_schedules\[(gpt2-options[13]|vit)",
    r"building/test_pipelined_training\.py::test_four_stages\[llama",
    r"building/test_pipelined_training\.py::test_checkpoints_move_between_meshes\[first1",
    r"compiling/test_ledger\.py::test_other_models_move_what_the_ledger_says\[gpt2-mesh[2-7]",
    r"export/test_rank_graph\.py::test_every_model_says_what_it_says_unsharded\[(?!.*4)",
    r"export/test_trt_network\.py::test_every_model\[(llama-1|llama-4|gpt2-2|gpt2-4|qwen3-[12]|mixtral-[14])",
    r"house/test_examples\.py::test_trainer_is_stopped_and_resumes_on_another_mesh\[tp-",
    r"memory/test_budget\.py::test_every_model_under_every_budget\[(gpt2|vit)",
    r"memory/test_budget\.py::test_ranks_stay_within_their_budget\[sizes1",
    r"memory/test_budget\.py::test_the_code_of_inductor_stays_within_a_budget",
    r"memory/test_memory\.py::test_prediction_for_inductor\[(ddp|zero1)",
    r"memory/test_memory\.py::test_prediction_for_inductor_on_two_axes",
    r"planning/test_plan_estimate\.py::test_memory_and_traffic\w*\[(llama_gqa|opt|gpt_neox|qwen3)",
    r"planning/test_two_axes\.py::test_all_ranks_are_given_one_batch\[2",
    r"runtime/agreement/test_faulty_rank\.py::test_one_rank_is_at_fault\[(stops-|late_dies0|late_fails|saves0-dp_)",
    r"runtime/test_generation\.py::test_tokens_are_those_of_serial\[(llama|qwen3)",
    r"runtime/test_generation\.py::test_four_ranks_and_a_quarter\w*\[(gemma3|gpt2|t5)",
    r"training/test_backend\.py::test_other_models\[(llama_|bart|clip|opt|gpt_neox|qwen3|transformer\])",
    r"training/test_data_checkpoint\.py::test_from_cp_and_tp\[other1",
    r"training/test_data_checkpoint\.py::test_experts_on_two_axes_and_back",
    r"training/test_data_checkpoint\.py::test_there_and_back_is_as_if_never_moved\[first1",
    r"training/test_data_optimizers\.py::test_adamw_and_its_schedule\[.*(capturable|fused)",
    r"training/test_data_parallel_steps\.py::test_matrix\[(gpt2|convnet)-sizes[1-4]",
    r"training/test_training_matrix\.py::test_three_steps_on_every_mesh\[(bert|vit|t5-False)",
    r"verification/test_mixture_steps\.py::test_three_steps\[(mixtral|qwen3_moe|olmoe|gpt_oss|Loop|PickingLoop)-dp_shard",
    r"verification/test_mixture_steps\.py::test_three_steps\[(deepseek_v3-tp|PickingLoop-ep|(mixtral|gpt_oss|deepseek_v3)-ep, tp)",
    r"verification/test_verify\.py::test_sequence_and_data_parallel\[dp_replicate",
    r"verification/test_verify\.py::test_equal\[mesh2",
)
_ROW = re.compile(rf"tests/(?:{'|'.join(ROWS)})")


def is_left_to_others(test: str) -> bool:
    """Whether CI leaves out the test of this id."""
    return _ROW.match(test) is not None
