"""Evaluation: retrieval through lm-eval, perplexity against position, and the report on both."""

from rope_patch.utils.front import front

front(
    __name__,
    {
        "comparison": "comparison_request",
        "decision_plan": "ANSWER_DEVIATION DEPTH_ANSWER_DEVIATION TEXT_DEVIATION has_equal_depths "
        "plan_sentences text_deviation",
        "encoding_facts": "RowsGuard model_lengths",
        "language_model": "LongContextLM",
        "measures.external_results": "ExternalResults",
        "measures.external_tasks": "ExternalTask",
        "measures.longppl": "default_short_context find_key_tokens longppl losses_at",
        "measures.perplexity": "block_losses document_losses token_losses",
        "measures.sliding_window": "window_ends window_losses",
        "measures.speed": "SpeedRequest bench_methods",
        "measures.task_index": "TaskIndex",
        "measures.timed_method": "TimedMethod compare_times count_recompilations "
        "decode_start_length make_timed_method measure_memory timing_row",
        "merging": "add_other_weights merge_runs",
        "pipeline": "evaluate",
        "profiles": "PROFILES choose_profile default_lengths fit_tasks",
        "question": "Question",
        "report.cost_tables": "cost_table short_table",
        "report.figures": "draw_figures",
        "report.format": "change_range change_text nats_range percent_range perplexity_range",
        "report.gaps": "find_gaps gap_sentence",
        "report.headline": "headline",
        "report.heatmap": "depth_maps draw_heat_maps",
        "report.panels": "log_ticks",
        "report.ranking": "Ranking",
        "report.results.run_statistics": "RunStatistics",
        "report.retrieval_tables": "accuracy_tables can_tell heat_maps retention_table",
        "report.summary": "summary_sentences summary_warnings",
        "report.summary_table": "summary_table",
        "report.table": "Cell Row Table ratio_column",
        "report.terminal": "fitted_table",
        "report.verdict": "is_shown_to_help",
        "report.writer": "write_report",
        "request": "EvalRequest",
        "results_schema": "RunRecord RunsRecord",
        "sanity": "cautions",
        "session": "find_other_config rotation_identity",
        "vllm_commands": "config_overrides engine_commands",
    },
)
