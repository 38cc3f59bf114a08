"""The parts of the suite: one table says which tests are slow, which run at night, and why. All others are fast.

The first row whose pattern occurs in the id of a test decides. A share of n makes one in n of the parameters of a
function fast, at least one, chosen by a hash of the ids, the same on every machine; the others are slow. A row may
keep one in n of the slow ones, and leave the others to the nightly tests.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple
from zlib import crc32

import pytest

COLLECTED = pytest.StashKey[dict[str, str]]()
"""In the stash of pytest's config: the part of every test that it has collected, those of other parts too."""


class Row(NamedTuple):
    pattern: str  # a regular expression, found anywhere in the id of a test
    part: str | int  # "fast", "slow", "nightly", or n: one in n is fast
    reason: str  # what it needs, or why it is slow
    kept: int = 1  # n: one in n of a function's slow tests stays slow, the others are nightly


CASES = r"test_conformance.py::Test(Cpu|Tiled|Device|Specification)::test_"
CPU = (
    r"engines/cpu/test_(backward_tangent|tangent|second_pass|weights|matrices|guard_pages|cpu_bits|targets|special_targets|"
    r"block_mask|plans)\.py"
)

TABLE: tuple[Row, ...] = (
    Row("test_nightly|test_jupyter", "nightly", "hours, or JupyterLab, expecttest, QEMU"),
    Row(r"test_docs\.py::test_pages_in_a_browser_run_every_block", "nightly", "minutes: Python in a page, by chapter"),
    Row(r"test_docs\.py::test_pages_in_a_browser_are_accessible\[light", "nightly", "minutes; the dark ones are slow"),
    # What only the extra test-slow installs
    Row(r"test_no_third.*\[1280", "nightly", "12 views, which 1600 has too"),
    Row("tests/browser/", "slow", "Playwright and Chromium"),
    Row("test_transformers|serves_transformers|test_pretrained|test_capture_table", "slow", "transformers"),
    Row("test_capture.py::test_(one_run|gen|a_prompt|another|a_cache)", "slow", "transformers"),
    Row("test_capture.py::test_(layers|on_disk|labels|bfloat16|the_last)", "slow", "transformers"),
    Row("test_pictured", "slow", "transformers"),
    Row(
        "test_picture_grids.py::test_(a_patch|a_given_grid_is|weights|a_head|sounds|patches|pixels_that|models|pictures|tiles|several|frames|words|chosen_queries_(h|are|of_p))",
        "slow",
        "transformers",
    ),
    Row("test_public.py::test_submodules|test_cli.py::(test_doctor$|.*no such model)", "slow", "transformers"),
    Row("test_notebook", "slow", "anywidget"),
    Row(r"test_docs\.py::test_(every_block|the_ref|links_lead|pages_in|a_failing)", "slow", "Sphinx and Chromium"),
    Row(r"test_claims\.py::test_a_false_number_fails", "slow", "Sphinx"),
    Row("test_jax_drop_in.py::.*(flax|linen|equinox)", "slow", "Flax and Equinox"),
    Row("test_install.py.*(sdist|node)", "slow", "hatchling"),
    Row("test_typing", "slow", "basedpyright, and mypy reads PyTorch and JAX"),
    Row("engines/device/test_device.py::test_(calls_on_a_device_in|mem)", "slow", "PyTorch compiles; long"),
    # The table of cases: in float32 all of it, first derivatives included
    Row(CASES + r"(forward|gradients)\[.*-float32\]", "fast", "every case on every engine"),
    Row(CASES + r"weights\[", "fast", "every case on every engine"),
    Row(r"TestCpu::test_(weights_of_large|what_overflows)", "slow", "compiles kernels"),
    Row(r"TestCpu::test_(special|second_\w+|tangents|what_is_hidden|ties)", "slow", "compiles kernels", 3),
    Row(CASES + r"second_\w+\[.*-float32", 6, "second derivatives"),
    Row("Test(Tiled|Device|Specification)::test_.*-float32", "fast", "nothing to compile"),
    Row(r"TestCpu::test_\w+\[", 24, "compiles kernels", 3),
    Row(CASES + r"\w+\[", 6, "other dtypes, special values"),
    # WebAssembly
    Row(r"test_wasm.py::test_(kernels|exports)_give", "slow", "the table of cases is in tests/browser too", 8),
    Row(r"test_wasm.py::test_(cases|files|errors|multiply|what_is)", "fast", "no Node.js"),
    Row(r"test_wasm.py", "slow", "Node.js, and compiles kernels"),
    Row(r"test_wasm_linking.py::test_(a_module_runs|code)", "slow", "Node.js, wasm-ld"),
    # Every public call, for each engine and sets of its functions
    Row(r"test_guard.py::test_no_code_sees_.*-numpy", 10, "15 sets of functions, 35 calls each", kept=2),
    Row(r"test_guard.py::test_no_code_sees", "slow", "15 sets of functions; PyTorch compiles, JAX traces", 12),
    # Products of kernels, dtypes, layouts and instruction sets
    Row(r"test_special_targets.py::test_special_values", "slow", "compiles kernels", 16),
    Row(CPU, "slow", "compiles kernels", 3),
    Row(r"engines/cpu/test_backward\.py::test_(agrees|any_number|dq_does)", 12, "compiles kernels", 2),
    Row(r"engines/cpu/test_backward\.py", "slow", "compiles kernels", 2),
    Row(r"test_cache.py::test_(a_whole|two_proc|a_corrupt|code_that_others|a_user)", "slow", "2 to 6 s each"),
    Row(r"test_conformance.py::test_(outputs_that_are_known|observing)", "slow", "compiles kernels"),
    Row(r"test_programs.py::test_every_case\[.*-cpu", 24, "compiles kernels", kept=4),
    Row(r"test_programs.py::test_(long_calls|tangents)", "slow", "compiles kernels", 3),
    Row("test_programs.py::test_every_case_without", 24, "compiles kernels"),
    Row("test_programs.py::test_every_case", 8, "each case in each deal"),
    Row("test_properties", "slow", "random calls"),
    Row("test_bits.py", 8, "long calls"),
    Row("test_spec.py.*slopes", 4, "differences of every entry"),
    # Adapters
    Row("test_torch_forward.py::test_(the_bits|steps_of)", 6, "each case in each dtype"),
    Row("test_torch_forward.py::test_calls_that_are_kept", 12, "each case, whole and cached"),
    Row("test_torch_forward.py::test_(rules_of_int|autocast|rules_with)", "slow", "compiles kernels"),
    Row(
        "test_torch_derivatives.py::test_(weights_diff|every_order|what_requires|merge|no_transform|third|vmap)"
        "|test_linear_attention_of_other|test_torch_functions.py::test_effective",
        "slow",
        "3 to 5 s each",
    ),
    Row("test_torch_recorded.py::test_(what|an_error|models|changing|bytecode_of)", "slow", "compiles several graphs"),
    Row("test_torch_recorded.py::test_a_(score|mask|helper|new_rule|function_)", 24, "compiles a graph each"),
    Row("test_torch_activation.py::test_a_compiled_graph|under_dynamic_shapes", 4, "compiles a graph each"),
    Row("test_torch_higher.py::test_formulas", 3, "each case"),
    Row("test_torch_rules.py::test_(a_parameter_without|a_function_that_reads|functions_of)", "slow", "1 to 3 s each"),
    Row("test_torch_(rules|varlen|nested)", 6, "compiles a kernel each"),
    Row("test_modules.py::test_(step_by|multihead_attention_from|a_decoder|positions_in)", 12, "compiles kernels"),
    Row("test_modules.py::test_functional_call|test_torch_documentation", "slow", "compiles kernels"),
    Row("test_torch_derivatives.py", 24, "each case in each mode"),
    Row(
        "test_torch_modes.py::test_(dispatch_modes_see_second|a_counter_that_was|make_fx|compiled|lin)", "slow", "long"
    ),
    Row("test_torch_(graphs|recompute)|test_modules.py.*compiled", "slow", "PyTorch compiles"),
    Row("parallel_models.py::test_the_table_of_cases", "nightly", "a minute; test_programs.py has each in lockstep"),
    Row("test_torch_(workers|sharded|parallel)", "slow", "starts processes that import PyTorch", 2),
    Row("test_torch_storage.py::test_storages_are_free.*(compiled|modules)", "slow", "2 s each"),
    Row("test_torch_modes", 8, "PyTorch traces"),
    Row("test_jax_derivatives.py::test_(third|hessian|weights|checkpoint)|test_without_x64", "slow", "2 to 9 s each"),
    Row("test_jax_scan.py::test_(all_inputs_and_vmap|memory)", "slow", "3 to 13 s"),
    Row(
        "test_jax_functions.py::test_(merge|linear_attention|a_metric|hopfield|effective)|broadcast_dropout",
        "slow",
        "3 to 7 s each",
        2,
    ),
    Row("test_beside_jax_nn", 24, "XLA compiles each"),
    Row("test_jax_(derivatives|scan)", 96, "XLA compiles each case", 3),
    Row("test_jax_values.py::test_every_case|test_jax.*(multihead_att|16_bits)", 12, "XLA compiles each in each dtype"),
    Row("test_jax_parts", 16, "compiles kernels"),
    Row(r"test_jax_sequence.py::test_(the_bits_of_one_device\[window|memory)", "fast", "a window alone"),
    Row("test_jax_sequence_table.py::test_every", "slow", "XLA compiles each row twice, 40 s in all", 3),
    Row("test_jax_(sharding|sequence|transformations)", "slow", "XLA compiles meshes and exports; flatbuffers"),
    Row(r"tests/jax/test_low\.py", "slow", "XLA compiles each call"),
    Row("tests/jax/", 24, "XLA compiles each call"),
    # The rest
    Row("test_parts.py::test_every_row", "slow", "collects all tests, those of test-slow too"),
    Row("test_simultaneous_calls.py.*compile", "slow", "two processes compile kernels"),
    Row("test_fork.py.*whose_threads_work", 6, "many processes or kernels"),
    Row(r"test_memory.py.*\[bfloat16\]", "fast", "the other dtypes are by shares"),
    Row("test_memory.py::test_a_long_causal", "slow", "2 s"),
    Row("test_memory.py", 6, "long calls"),
    Row("test_long_rules", "slow", "long rules"),
    Row(
        "test_captured.py::test_(some_heads_are|the_last_quer|what_has_no|some_heads_of|the_ex)",
        "slow",
        "1 to 2 s each",
    ),
    Row("test_operations.py|test_captured.py", 4, "the same check of many"),
    Row("test_cli.py::test_insight_ablates_as", 2, "runs the example model 48 times"),
    Row(
        "test_cli.py::test_(look_at_any|the_module_is)|test_bounds.py::test_the_tiles_vis", 6, "the same check of many"
    ),
    Row("test_cli.py::test_a_mistake.*at most 64 MiB", "slow", "5 s: a large file"),
    Row("test_rowsums|test_joining|test_small_calls", 6, "long or many calls"),
    Row("test_platforms.py::test_calls|test_a_long_circle|test_results_are_the_same_with", "slow", "2 to 7 s each"),
    Row("test_platforms.py::test_kernels_of_other", 3, "compiles kernels, which no cache keeps"),
    Row("test_saturated.py::test_tangents", 3, "each engine in each dtype"),
    Row("test_multihead_attention_is_the_ref|test_heads_measured_when", "slow", "compiles kernels"),
    Row("test_planning.py.*(however_long|a_million_keys|print_bytes)", "slow", "5 to 15 s each: many samples"),
    Row("test_answers.py::test_(profiles|no_square)|test_a_picture_needs_no_mat", "slow", "1 to 4 s each"),
    Row("test_viewer.py::test_(png_of|picture_is)", 4, "draws each picture"),
    Row("test_each_head_is_ablated", "slow", "runs the example model 24 times"),
    Row("tests/bench/", "slow", "benchmarks are beside the package"),
)


def row(test: str) -> Row | None:
    """Return the row that decides on a test, by its id."""
    return next((row for row in TABLE if re.search(row.pattern, test)), None)


def parts(tests: Iterable[str]) -> dict[str, str]:
    """Return "fast", "slow" or "nightly" for the ids of tests, all those of a function together."""
    found, products = {}, defaultdict(list)
    for test in tests:
        one = row(test)
        if one is not None and (isinstance(one.part, int) or one.kept > 1):
            products[test.partition("[")[0], one].append(test)
        else:
            found[test] = "fast" if one is None else str(one.part)
    for (_, one), group in products.items():
        group.sort(key=lambda test: crc32(test.encode()))
        fast = -(-len(group) // one.part) if isinstance(one.part, int) else 0
        for n, test in enumerate(group):
            found[test] = "fast" if n < fast else "nightly" if (n - fast) % one.kept else "slow"
    return found
