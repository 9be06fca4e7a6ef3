"""Evaluation: retrieval through lm-eval, perplexity against position, and the report on both."""

from rope_patch.utils.lazy_exports import export_lazily

export_lazily(
    __name__,
    {
        "answers": "Question",
        "decision_plan": (
            "ANSWER_DEVIATION DEPTH_ANSWER_DEVIATION has_equal_depths PassTime "
            "plan_sentences TEXT_DEVIATION text_deviation"
        ),
        "encoding_facts": "model_lengths RowsGuard",
        "language_model": "LongContextLM",
        "measures.external_tasks": "ExternalResults ExternalTask TaskIndex",
        "measures.perplexity": (
            "block_losses default_short_context document_losses find_key_tokens "
            "longppl losses_at token_losses window_ends window_losses"
        ),
        "measures.speed": (
            "bench_methods compare_times count_recompilations decode_start_length "
            "make_timed_method measure_memory SpeedRequest TimedMethod timing_row"
        ),
        "pipeline": "evaluate",
        "profiles": "choose_profile comparison_request default_lengths fit_tasks PROFILES",
        "report.figures": "depth_maps draw_figures draw_heat_maps log_ticks",
        "report.merging": "add_other_weights merge_runs",
        "report.model_index": "evaluations model_index",
        "report.results.run_statistics": "RunStatistics",
        "report.summary": (
            "fitted_table first_screen summary_cautions summary_sentences summary_table"
        ),
        "report.table": (
            "Cell change_range change_text nats_range percent_range "
            "perplexity_range ratio_column Row Table"
        ),
        "report.tables": (
            "accuracy_tables can_tell cost_table heat_maps retention_table short_table usable_table"
        ),
        "report.conclusions": "conclude find_gaps gap_sentence is_shown_to_help Ranking",
        "report.vllm_commands": "config_overrides engine_commands",
        "report.writer": "write_report",
        "request": "EvalRequest",
        "results_schema": "RunRecord RunsRecord",
        "retrieval_run": "cautions",
        "session": "find_other_config rotation_identity",
    },
)
