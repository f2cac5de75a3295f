"""Rows of matrices that CI leaves out: `make test-exhaustive` runs them, an hour and a half.

CI runs a row's neighbours: the same code, another model or mesh. Run these before a release, and
after a change to what one is about (`make test-exhaustive ARGS="-k mixture"`).

A share of them is drawn for CI by the commit, another at each: a third of the models that README
lists and no other row holds, and `OTHERS` of all the rest. Of the slow tests that are not among
them CI draws a share as well (`share_of`), another at each landing, so that it ends in time on a
slow machine that has other things to do; AUTOSHARD_ROWS=all runs them all.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

#: File, test, and what the row's id begins with (empty: every row). `training/test_scenarios.py`
#: marks its own.
ROWS = {
    "building/test_composed_pipelines.py": {
        "test_data_parallel_stages": "llama-sizes1|gpt2-sizes2",
        "test_axes_inside_of_stages": "gpt2-sizes3",
        "test_checkpoints_of_sharded_stages": "first[12]",
        "test_what_eager_code_reads_and_writes_of_shards": "sizes[12]",
    },
    "building/test_pipeline_precision.py": {
        "test_other_schedules_and_axes": "sizes[02]",
    },
    "building/test_pipelined_training.py": {
        "test_other_models_and_schedules": "gpt2-options[13]|vit",
        "test_four_stages": "llama",
        "test_checkpoints_move_between_meshes": "first1",
    },
    "compiling/test_ledger.py": {
        "test_other_models_move_what_the_ledger_says": "gpt2-mesh[2-7]",
    },
    "export/test_rank_graph.py": {
        "test_every_model_says_what_it_says_unsharded": ".*-None",
    },
    "export/test_trt_network.py": {
        "test_every_model": "llama-[14]|gpt2-[24]|qwen3-[12]|mixtral-[14]",
    },
    "house/test_examples.py": {
        "test_trainer_is_stopped_and_resumes_on_another_mesh": "tp-",
    },
    "memory/test_budget.py": {
        "test_every_model_under_every_budget": "gpt2|vit",
        "test_ranks_stay_within_their_budget": "",
        "test_the_code_of_inductor_stays_within_a_budget": "",
    },
    "memory/test_memory.py": {
        "test_prediction_for_inductor": "ddp|zero1|tp",
        "test_prediction_for_inductor_on_two_axes": "",
    },
    "planning/test_plan_estimate.py": {
        "test_memory_and_traffic_are_near_those_of_the_program": "llama_gqa|opt|gpt_neox|qwen3",
    },
    "planning/test_two_axes.py": {
        "test_all_ranks_are_given_one_batch": "2",
    },
    "runtime/agreement/test_faulty_rank.py": {
        "test_one_rank_is_at_fault": "stops-|late_dies0|late_fails|saves0-dp_",
    },
    "runtime/test_generation.py": {
        "test_tokens_are_those_of_serial": "llama|qwen3",
        "test_four_ranks_and_a_quarter_of_the_cache_on_each": "gemma3|gpt2|t5|mamba|whisper",
    },
    "training/test_backend.py": {
        "test_other_models": r"llama_|bart|clip|opt|gpt_neox|qwen3|transformer\]",
    },
    "training/test_data_checkpoint.py": {
        "test_from_cp_and_tp": "other1",
        "test_experts_on_two_axes_and_back": "",
        "test_there_and_back_is_as_if_never_moved": "first1",
    },
    "training/test_data_optimizers.py": {
        "test_adamw_and_its_schedule": ".*fused",
    },
    "training/test_data_parallel_steps.py": {
        "test_matrix": "(gpt2|convnet)-sizes[0-4]",
    },
    "training/test_training_matrix.py": {
        "test_three_steps_on_every_mesh": "bert|vit|t5-False",
    },
    "verification/test_evaluation.py": {
        "test_logits_are_those_of_the_serial_model": "(?!llama_gqa|mixtral|t5)",
    },
    "verification/test_mixture_steps.py": {
        "test_three_steps": (
            r"(mixtral|qwen3_moe|olmoe|gpt_oss|Loop|PickingLoop)-dp_shard"
            r"|(mixtral|gpt_oss|deepseek_v3)-ep, tp|deepseek_v3-tp|PickingLoop-ep"
        ),
    },
    "verification/test_verify.py": {
        "test_sequence_and_data_parallel": "dp_replicate",
        "test_equal": "mesh2",
    },
}
#: What README lists as tested and these rows alone hold, of which CI runs one in `SHARE`.
LISTED = "tests/training/test_backend.py::test_other_models"
SHARE = 3
#: How many of all the other rows it runs: with `LISTED` about two minutes of two cores.
OTHERS = 3
#: The share of the other slow tests that CI runs.
SHARE_OF_SLOW = 0.07
#: Quick tests of many like rows, or of half a minute and more: two thirds of the seconds of a whole
#: run. CI runs a share of them, drawn row by row, another at each landing.
QUICK = {
    "building/test_awaited_gradients.py": {"test_three_steps_are_serial_ones"},
    "building/test_chosen_pipelines.py": {"test_steps_of_chosen_stages"},
    "building/test_composed_pipelines.py": {"test_axes_inside_of_stages"},
    "building/test_pipeline_stages.py": {"test_a_step_is_the_serial_one"},
    "building/test_pipelined_training.py": {"test_three_steps_of_a_saved_plan"},
    "compiling/test_activation_checkpointing.py": {
        "test_no_mask_is_kept",
        "test_collectives_of_a_region_by_policy",
    },
    "compiling/test_bucketing.py": {"test_counts", "test_graphs_hold_what_they_note"},
    "compiling/test_communication.py": {
        "test_a_rank_never_sends_more_than_the_ledger",
        "test_an_expert_is_split_and_not_gathered",
    },
    "compiling/test_torch_tensorrt.py": {"test_it_makes_the_network_we_make"},
    "export/rank_graph/test_chosen_rows.py": {
        "test_rows_are_those_of_the_choices_and_say_the_same"
    },
    "export/test_cache_proof.py": {
        "test_what_a_position_decides_is_looked_up_by_it",
        "test_a_cache_continues_what_was_written_out",
        "test_what_looks_at_other_tokens_is_refused_with_its_line",
        "test_a_cache_holds_no_more_tokens_than_the_model_has_positions",
        "test_what_a_rule_forgets_is_seen_before_anything_is_written",
        "test_rounding_is_no_other_token",
    },
    "export/test_export_matrix.py": {
        "test_a_learned_bias_of_distances_is_continued",
        "test_a_cell_is_checked",
    },
    "export/test_export_trtllm.py": {"test_configuration_that_disagrees"},
    "export/test_onnx_export.py": {
        "test_a_planted_fault_is_noticed",
        "test_onnx_says_what_the_model_says_and_what_the_network_says",
    },
    "export/test_trt_network.py": {"test_llama_decodes_what_the_model_decodes"},
    "export/test_trtllm_logits.py": {
        "test_logits_are_those_of_the_model",
        "test_what_a_family_has_not",
    },
    "memory/test_budget.py": {
        "test_a_step_stays_within_its_budget",
        "test_a_longer_batch_stays_within_the_budget",
    },
    "memory/test_memory.py": {
        "test_prediction_of_graphs",
        "test_stages_of_zero",
        "test_recomputation_keeps_less_and_peaks_lower",
    },
    "mesh_search/test_choice.py": {"test_batches_decide_and_ranks_agree"},
    "mesh_search/test_row_placements.py": {"test_no_row_is_slower_than_with_placements_first"},
    "mesh_search/test_stages_beside_cp_and_ep.py": {
        "test_stages_send_and_hold_what_the_program_does"
    },
    "passes/experts/test_experts_on_two_axes.py": {
        "test_every_way_of_tp_on_the_graph_of_a_rank_of_cp",
        "test_every_way_of_tp_goes_with_ep",
    },
    "passes/masks/test_attention_masks.py": {
        "test_one_process_recovers_masks_by_name",
        "test_data_parallel_ranks_may_run_different_programs",
    },
    "passes/test_chunk_loss.py": {
        "test_loss_and_gradients_are_those_of_the_serial_model",
        "test_what_travels_is_what_the_whole_loss_sends",
    },
    "passes/test_fuse_collectives.py": {
        "test_a_dense_block_has_no_gather_apart_and_sends_what_it_sent"
    },
    "passes/test_fuse_inference_layers.py": {"test_a_decode_step_in_launches_and_in_bytes"},
    "passes/test_invariant_random.py": {
        "test_models_with_dropout_compute_what_one_device_computes"
    },
    "passes/test_recover_masks.py": {
        "test_a_packed_and_a_left_padded_batch_have_no_square_tensor",
        "test_models_of_hugging_face_have_no_square_tensor",
    },
    "planning/batch_axis/test_batch_axis.py": {"test_the_charge_is_of_what_runs"},
    "planning/expert_axis/test_expert_axis.py": {
        "test_what_a_plan_file_says_runs_and_is_the_serial_model",
        "test_prices_are_those_of_the_estimate_and_of_the_program",
    },
    "planning/test_context_parallel.py": {
        "test_training_on_cp_is_serial_training",
        "test_a_model_on_cp_is_the_serial_one",
        "test_ranks_of_cp_are_given_one_batch",
        "test_a_region_is_in_head_tail_order_where_all_of_it_can_be",
    },
    "planning/test_experts.py": {
        "test_each_way_equals_serial_and_sends_what_its_formula_says",
        "test_a_layer_of_qwen3_30b_sends_no_more_than_its_tokens_at_once",
        "test_the_cheapest_way_changes_where_the_formulas_cross",
        "test_each_way_runs_the_kernels_of_16_bits",
    },
    "planning/test_plan_estimate.py": {"test_memory_and_traffic_are_near_those_of_the_program"},
    "planning/test_two_axes.py": {"test_a_model_on_cp_and_tp_is_the_serial_one"},
    "quantization/test_quantized_engines.py": {"test_ranks_say_what_transformers_says"},
    "replay/test_replay.py": {"test_programs_are_those_of_before"},
    "runtime/agreement/test_never_hang.py": {"test_batches_that_differ"},
    "runtime/optimizer/test_optimizer_on_meshes.py": {"test_clipped_steps_are_those_of_one_device"},
    "runtime/optimizer/test_optimizer_on_parts.py": {
        "test_ranks_that_sort_their_parameters_differently_are_an_error"
    },
    "runtime/optimizer/test_optimizer_table.py": {"test_clipped_steps_given_the_same_gradients"},
    "runtime/optimizer/test_owned_matrices.py": {
        "test_stacks_of_experts",
        "test_steps_on_two_ranks_are_those_of_one_device",
    },
    "runtime/parameters/test_precision.py": {
        "test_dtypes_on_the_wire",
        "test_against_a_serial_model_that_casts",
    },
    "runtime/parameters/test_storage.py": {"test_owners", "test_two_axes"},
    "runtime/test_generation.py": {
        "test_a_step_of_two_reductions_a_layer_and_one_small_gather",
        "test_a_step_has_two_reductions_a_layer",
    },
    "runtime/test_spmd_types.py": {"test_each_dropped_change_is_found"},
    "training/test_backend.py": {"test_optimizers"},
    "training/test_collectives_at_run_time.py": {
        "test_a_hybrid_mesh_issues_what_the_ledger_says",
        "test_two_processes_issue_what_the_ledger_says",
    },
    "training/test_data_parallel_steps.py": {"test_several_buckets", "test_five_steps_two_ranks"},
    "training/test_graph_breaks.py": {
        "test_activation_checkpointing",
        "test_autocast_around_the_call",
    },
    "training/test_loss_models.py": {"test_loss_and_gradients_are_those_of_the_dense_model"},
    "training/test_scenarios.py": {"test_tensor_parallel", "test_sharded_data_parallel"},
    "verification/test_mixture_steps.py": {
        "test_three_steps",
        "test_clipped_adamw_whatever_travels_over_ep",
    },
    "verification/test_mixtures.py": {
        "test_a_family_equals_its_serial_model",
        "test_a_family_on_ep_equals_its_serial_model",
    },
    "verification/test_verification.py": {
        "test_all_ranks_compute_what_the_serial_graph_computes",
        "test_a_sequence_parallel_llama_computes_what_the_serial_one_computes",
    },
    "verification/test_verify.py": {
        "test_a_rank_that_fails_between_calls",
        "test_a_fault_through_processes",
    },
    "weights/test_engines.py": {"test_a_refitted_engine_is_one_that_is_exported_again"},
    "weights/test_live_weights.py": {
        "test_a_trainer_s_weights_are_those_of_its_exported_directory",
        "test_from_two_processes_to_two_others",
    },
}
SHARE_OF_QUICK = 0.2
EVERY = "all"
_ID = re.compile(r"tests/(?P<file>[^:]+)::(?P<test>\w+)(?:\[(?P<row>.*\]))?$")


def is_left_to_others(test: str) -> bool:
    """Whether CI leaves out the test of this id."""
    found = _ID.match(test)
    rows = ROWS.get(found["file"], {}).get(found["test"]) if found else None
    return rows is not None and re.match(rows, found["row"] or "") is not None  # type: ignore[index]


def share_of(test: str, slow: bool = True) -> float:
    """The share of a file's slow tests that CI runs, of those that are in no row of `ROWS`; of the
    quick ones that of their like in `QUICK`."""
    found = _ID.match(test)
    if found is None:
        return 1.0
    if slow:
        return SHARE_OF_SLOW
    return SHARE_OF_QUICK if found["test"] in QUICK.get(found["file"], ()) else 1.0


def rests(test: str, seed: str, slow: bool = True) -> bool:
    """Whether CI leaves out this test, which is in no row of `ROWS`, at this commit."""
    share = share_of(test, slow)
    return seed not in ("", EVERY) and random.Random(f"{seed} {test}").random() >= share


def seed() -> str:
    """What the rows are drawn by: AUTOSHARD_ROWS, or the commit; empty, and none are, without."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"]
    given = os.environ.get("AUTOSHARD_ROWS")
    if given is None:
        given = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return given


def drawn(rows: Sequence[str], seed: str) -> set[str]:
    """The ids, of the rows that CI leaves out, of those that it runs this time."""
    if not seed:
        return set()
    draw, ordered = random.Random(seed), sorted(rows)
    listed = [row for row in ordered if row.startswith(LISTED)]
    others = [row for row in ordered if not row.startswith(LISTED)]
    found = draw.sample(listed, -(-len(listed) // SHARE))
    return {*found, *draw.sample(others, min(OTHERS, len(others)))}
