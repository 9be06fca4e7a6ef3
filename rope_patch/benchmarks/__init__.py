"""Measure speed: of the kernels, of evaluations that share prefixes, and of the vLLM plugin.

- `kernels/` is `rope-patch bench` without a model: a `KernelBenchRequest` comes in, results as one
  dict of plain data go out, and `report` makes text and pages of them. Open `kernels/benchmark.py`
  first; `kernels/problems.py` has the problems, `kernels/timing.py` the clocks,
  `kernels/implementations.py` and `third_party.py` what is compared. `kernels/self_test.py` is
  `rope-patch bench --self-test`.
- `prefix_sharing` (`python -m rope_patch.benchmarks.prefix_sharing`) compares evaluations with
  plain lm-eval.
- `gpu_day` runs the steps of `gpu_steps` within the minutes that a GPU is there (`make gpu`);
  `model_shapes` and `kernels/tile_search.py` are measurements of it that no other command has.
- `serving` (`python -m rope_patch.benchmarks.serving`) compares the plugin for vLLM with static
  YaRN.
"""

from rope_patch.utils.lazy_exports import export_lazily

export_lazily(
    __name__,
    {
        "gpu_day": "CUT Day DONE FAILED Step TO_DO",
        "gpu_steps": "REAL day_steps",
        "kernels.benchmark": "KernelBenchRequest",
        "kernels.implementations": "Implementation Unavailable auto_implementation "
        "builtin_implementations describe_error",
        "kernels.model_steps": "LaunchCounts OperatorCount count_launches dispatched_launches "
        "measure_launches",
        "kernels.problems": "SHAPES VIEWS Problem Shape samples_needed",
        "kernels.third_party": "third_party_implementations",
        "kernels.timing": "CopyBaseline ImplementationRun QueueSleep copied_bytes moved_bytes "
        "peak_memory time_calls",
    },
)
