"""Which of the long tests each tier runs."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

TIERS: Mapping[str, tuple[int, int]] = {
    "tests/acceptance/test_all_targets.py": (0, 0),
    "tests/acceptance/test_bad_input.py": (12, 2),
    "tests/acceptance/test_bad_input.py::test_full_disk": (0, 1),
    "tests/acceptance/test_bad_input.py::test_interrupted_export_leaves_nothing": (40, 3),
    "tests/acceptance/test_bad_input.py::test_sources": (40, 4),
    "tests/acceptance/test_bad_input.py::test_unknown_recipe_key": (0, 1),
    "tests/acceptance/test_beams.py": (12, 1),
    "tests/acceptance/test_families.py": (8, 1),
    "tests/acceptance/test_families_experts.py": (16, 2),
    "tests/acceptance/test_families_experts.py::test_a_saved_model_gives_the_bundle_that_the_model_gives": (0, 1),
    "tests/acceptance/test_families_experts.py::test_tolerance_would_show_another_choice_of_experts": (0, 1),
    "tests/acceptance/test_families_table.py": (0, 5),
    "tests/acceptance/test_formats.py": (6, 1),
    "tests/acceptance/test_formats.py::test_every_instruction_set_gives_nearly_the_same": (0, 1),
    "tests/acceptance/test_formats.py::test_smollm2_in_int8": (0, 1),
    "tests/acceptance/test_greedy.py": (0, 1),
    "tests/acceptance/test_invariance.py": (12, 1),
    "tests/acceptance/test_invariance_experts.py": (12, 1),
    "tests/acceptance/test_kv_formats.py": (16, 1),
    "tests/acceptance/test_law.py": (3, 1),
    "tests/acceptance/test_mutations.py": (6, 6),
    "tests/acceptance/test_onnx_families.py": (0, 1),
    "tests/acceptance/test_onnx_kernels.py::test_narrow_formats_have_the_cpu_targets_logits": (0, 1),
    "tests/acceptance/test_reproducible.py": (0, 1),
    "tests/acceptance/test_small_pool.py": (0, 1),
    "tests/acceptance/test_tvm_families.py": (0, 1),
    "tests/benchmarks/": (0, 1),
    "tests/optimizer/bisect/": (12, 1),
    "tests/optimizer/bisect/test_grouped_heads.py": (0, 1),
    "tests/optimizer/bisect/test_runs.py::test_experts": (0, 1),
    "tests/optimizer/calibration/test_calibrate.py::test_an_export_that_samples_is_the_same_each_time": (0, 1),
    "tests/optimizer/capture/": (8, 1),
    "tests/optimizer/capture/test_freeze_rope.py::test_an_export_says_and_verifies_the_stated_length": (0, 1),
    "tests/optimizer/capture/test_gguf.py::test_the_real_model": (0, 1),
    "tests/optimizer/capture/test_hub.py::test_a_plan_fetches_the_configuration_alone": (0, 1),
    "tests/optimizer/capture/test_hub.py::test_everything_that_takes_a_source_takes_an_id": (0, 1),
    "tests/optimizer/capture/test_hub.py::test_the_command_takes_a_gguf_file_of_the_hub": (0, 1),
    "tests/optimizer/emit/": (12, 1),
    "tests/optimizer/emit/onnx/test_emit_model.py::test_more_families": (12, 3),
    "tests/optimizer/emit/onnx/test_kernels.py::test_experts_and_routers_stay_as_in_the_contrib_variant": (0, 1),
    "tests/optimizer/emit/stablehlo/test_emitter.py::test_slots_for_few_tokens": (0, 1),
    "tests/optimizer/emit/stablehlo/test_families.py": (0, 1),
    "tests/optimizer/emit/stablehlo/test_iree_files.py": (0, 1),
    "tests/optimizer/emit/stablehlo/test_iree_files.py::test_what_the_compiler_refuses_and_that_it_is_missing": (1, 1),
    "tests/optimizer/emit/tensorrt/test_build_engines.py::test_caches_of_8_bits": (0, 1),
    "tests/optimizer/emit/tensorrt/test_build_engines.py::test_copies_of_caches_in_engines_are_said": (0, 1),
    "tests/optimizer/emit/tensorrt/test_build_network.py": (3, 2),
    "tests/optimizer/emit/tensorrt/test_build_network.py::test_another_size_in_every_type": (0, 1),
    "tests/optimizer/emit/tensorrt_rtx/test_segments_table.py::test_row": (12, 3),
    "tests/optimizer/emit/tensorrt_rtx/test_whole_table.py::test_row": (12, 3),
    "tests/optimizer/emit/torch_tensorrt/": (0, 1),
    "tests/optimizer/emit/tvm/": (12, 1),
    "tests/optimizer/emit/tvm/test_cuda_files.py": (0, 1),
    "tests/optimizer/emit/tvm/test_emitter.py::test_two_exports_are_byte_equal": (0, 1),
    "tests/optimizer/emit/tvm/test_emitter.py::test_weights_of_fewer_bits": (0, 1),
    "tests/optimizer/evaluate/test_evaluate.py::test_divergence_of_a_perturbed_model_equals_torch": (0, 1),
    "tests/optimizer/evaluate/test_source_model.py::test_a_gguf_file_is_close_to_its_bundle": (0, 1),
    "tests/optimizer/export/": (6, 1),
    "tests/optimizer/measure/test_lazy_weights.py::test_no_more_than_a_module_s_weights_are_alive": (0, 1),
    "tests/optimizer/plan/test_programs.py::test_gpus_are_planned_with_the_cuda_target_s_program": (0, 1),
    "tests/optimizer/search/": (8, 1),
    "tests/optimizer/search/test_orders.py": (0, 1),
    "tests/optimizer/test_pruned_export.py::test_formats_on_top": (0, 1),
    "tests/optimizer/verify/test_measure_passes.py::test_the_pass_is_named_in_the_middle": (0, 1),
    "tests/passes/": (12, 1),
    "tests/plugins/cpu/test_executable_decoder.py::test_weights_live_as_long_as_the_program": (0, 1),
    "tests/plugins/cpu/test_executable_tuning.py::test_no_choice_changes_a_bit": (0, 1),
    "tests/plugins/tensorrt/test_paged_attention.py::test_attention_has_a_program_for_each_tile_and_head": (0, 1),
    "tests/plugins/triton/test_attention_kernels.py": (6, 1),
    "tests/plugins/triton/test_attention_kernels.py::test_attention_is_the_reference_everywhere": (0, 12),
    "tests/plugins/triton/test_compile_ahead.py": (12, 1),
    "tests/plugins/triton/test_compile_ahead.py::test_every_gpu": (0, 0),
    "tests/plugins/triton/test_sampling_kernels.py": (20, 6),
    "tests/plugins/triton/test_step_kernels.py": (8, 1),
    "tests/runtime/executors/test_cuda_blocks.py": (31, 20),
    "tests/runtime/executors/test_cuda_blocks.py::test_formats_mean_what_they_say": (0, 20),
    "tests/runtime/executors/test_cuda_blocks_families.py": (0, 20),
    "tests/runtime/executors/test_cuda_prefixes.py": (0, 1),
    "tests/runtime/executors/test_gpu_sampling.py": (0, 2),
    "tests/runtime/executors/test_static_shapes.py::test_random_traffic_has_the_same_bits": (0, 1),
    "tests/runtime/kv_cache/test_window_pools.py::test_nobody_waits_for_a_pool_that_is_enough_for_windows": (6, 1),
    "tests/runtime/scheduler/test_continuous.py::test_any_course_of_events_ends_well": (0, 1),
    "tests/runtime/test_hidden_states.py::test_they_are_those_of_transformers": (8, 1),
    "tests/runtime/test_hidden_states.py::test_what_a_program_does_not_have_is_refused": (0, 1),
    "tests/runtime/test_hostile_calls.py": (100, 10),
    "tests/test_ci_pipeline.py::test_what_is_wrong_is_said_before_the_work": (0, 1),
    "tests/test_doc_snippets.py::test_the_tutorial_runs": (0, 1),
    "tests/test_examples.py::test_a_page_s_example_runs": (0, 5),
    "tests/test_examples.py::test_an_example_runs": (6, 1),
    "tests/test_extension.py::test_a_recipe_names_them": (0, 1),
}
"""Of tests that take long: of each one's cases `make test` runs the first and, of the others, one in so many; CI too.

0: none, be they cases or not. The longest name that fits counts. `make soak` runs what CI leaves out.
"""


def left_out(quick: int, thorough: int, case: str, *, first: bool) -> str | None:
    """The mark of a test that a tier leaves out; see TIERS."""

    def runs(one_in: int) -> bool:
        return one_in > 0 and (first or not case or zlib.crc32(case.encode()) % one_in == 0)

    return "soak" if not runs(thorough) else None if runs(quick) else "matrix"
