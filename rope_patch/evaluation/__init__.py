"""Evaluation: retrieval through lm-eval, perplexity against position, and the report on both."""

from rope_patch.utils.front import front

__all__, __getattr__, __dir__ = front(
    __name__,
    {
        "pipeline": "evaluate",
        "request": "EvalRequest",
        "language_model": "LongContextLM",
        "report.results.run_statistics": "RunStatistics",
        "report.writer": "write_report",
    },
)
