"""Extend a checkpoint: from a model to a longer one with the proof beside it, in one call."""

from rope_patch.extending.entry_point import extend
from rope_patch.extending.request import Extended
from rope_patch.utils.lazy_exports import export_lazily

__all__ = ["Extended", "extend"]

export_lazily(
    __name__,
    {
        "fine_tuning": "measured_texts plan_training train training_data",
        "progress_page": "ProgressPage",
        "proof": (
            "base_request Candidate compared_candidates decide plan_samples "
            "read_results trained_candidate"
        ),
        "publication": "publish render_card write_exports",
        "request": "ExtendRequest parse_duration target_length",
        "work_folder": "WorkFolder",
    },
)
