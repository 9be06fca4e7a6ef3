"""Benchmarks of the kernels and of prefix sharing."""

from rope_patch.utils.front import front

front(
    __name__,
    {
        "kernels.implementations": (
            "Implementation Unavailable auto_implementation builtin_implementations describe_error"
        ),
        "kernels.launch_count": "LaunchCounts count_launches",
        "kernels.request": "KernelBenchRequest",
        "kernels.operator_count": "OperatorCount",
        "kernels.third_party": "third_party_implementations",
        "kernels.shapes": "SHAPES VIEWS Problem Shape samples_needed",
        "kernels.timing": "QueueSleep peak_memory time_calls",
        "kernels.workers": "CopyBaseline ImplementationRun copied_bytes moved_bytes",
    },
)
