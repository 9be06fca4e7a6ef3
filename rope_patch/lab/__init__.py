"""The lab: the same tiny decoder, trained short with each positional encoding and tested long."""

from rope_patch.utils.lazy_exports import export_lazily

export_lazily(
    __name__,
    {
        "cell_run": "build_model run_cell Trainer variants",
        "pipeline": "CellJournal run_lab",
        "report": "difference_range difference_text headline loss_cell share_cell write_report",
        "results": "LabRecord LabResults seeded_difference seeded_mean",
        "settings": "Cell LabSettings",
        "statements": "check_statements STATEMENTS verdict",
        "tasks": "position_edges recall_batch RecallTask RecallVocabulary TextTask",
    },
)
