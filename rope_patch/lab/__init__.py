"""The lab: the same tiny decoder, trained short with each positional encoding and tested long."""

from rope_patch.utils.front import front

front(
    __name__,
    {
        "cell_run": "run_cell",
        "interval": "seeded_difference seeded_mean",
        "measurement": "variants",
        "model": "build_model",
        "pipeline": "CellJournal run_lab",
        "recall_task": "RecallTask RecallVocabulary recall_batch",
        "report.headline": "headline",
        "report.numbers": "difference_range difference_text loss_cell share_cell",
        "report.writer": "write_report",
        "results": "LabResults",
        "results_schema": "LabRecord",
        "settings": "Cell LabSettings",
        "statements": "STATEMENTS check_statements verdict",
        "text_task": "TextTask position_edges",
        "trainer": "Trainer",
    },
)
