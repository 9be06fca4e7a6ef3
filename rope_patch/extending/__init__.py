"""Extend a checkpoint: from a model to a longer one with the proof beside it, in one call."""

from rope_patch.extending.entry_point import extend
from rope_patch.extending.result import Extended
from rope_patch.utils.front import front

__all__ = ["Extended", "extend"]

front(
    __name__,
    {
        "candidates": "Candidate compared_candidates trained_candidate",
        "card": "render_card",
        "fine_tuning": "measured_texts plan_training train training_data",
        "progress_page": "ProgressPage",
        "proof": "base_request decide plan_samples read_results",
        "publication": "publish write_exports",
        "request": "ExtendRequest parse_duration parse_target",
        "work_folder": "WorkFolder",
    },
)
