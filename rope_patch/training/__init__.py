"""Fine-tune a model for a longer context, from a recipe."""

from rope_patch.utils.lazy_exports import export_lazily

export_lazily(
    __name__,
    {
        "checkpoints": (
            "average_into find_damage last_complete latest_complete resume_checkpoint step_of"
        ),
        "data.aggregation": "TaskWeaver",
        "data.arguments": "check_data_arguments DataArguments require_no_document_masks",
        "data.documents": "compression_ratio tokenize_document TokenizedDocument",
        "data.packing": (
            "best_fit_decreasing collate PackedRows RowShare skipped_positions summarize"
        ),
        "data.readers": "find_source fingerprint",
        "finished_model": "write_finished_model",
        "identity": "CHANGEABLE_KEYS",
        "inspection.report": (
            "format_bins length_bins make_length_figure packing_yield write_length_plot"
        ),
        "inspection.survey": "CleanFolder DuplicateFinder",
        "memory.model": (
            "exchange_bytes host_memory_need longest_row memory_need MemoryNeed model_shape"
        ),
        "memory.plan": "step_work StepWork suggest_changes",
        "memory.recipe_setup": "read_environment training_setup",
        "model_setup": "liger_kernels_without_conflicts prepare_model",
        "monitor": "DivergenceGuard read_log TrainingProgress TrainingStopped",
        "objective.arguments": "ObjectiveArguments",
        "objective.chunk_sums": "Term ZLoss",
        "objective.chunked_loss": "install_loss Objective",
        "objective.distillation": "Distillation divergence Teacher",
        "optimizer": "decayed_names require_undecayed_embeddings same_rates",
        "recipe_files": "find_launch find_recipe",
        "run": "TrainingRun",
        "settings": (
            "ExtensionArguments known_keys parse_settings read_recipe Settings TrainArguments"
        ),
        "trainer": "finetune LongContextTrainer",
    },
)
