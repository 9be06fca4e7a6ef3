"""Keys that recipes cannot have, most of them of TrainingArguments, and what to use instead."""

from __future__ import annotations

UNSUPPORTED_KEYS = {
    "num_train_epochs": "rows are streamed without end: say max_steps or tokens",
    "load_best_model_at_end": "there is no validation set; retrieval_steps and rope-patch eval "
    "say how good the model is",
    "resume_from_checkpoint": "say resume: auto, or resume: PATH",
    "auto_find_batch_size": "memory is planned ahead: rope-patch finetune --plan",
    "eval_strategy": "say retrieval_steps: N",
    "eval_steps": "say retrieval_steps: N",
    "logging_nan_inf_filter": "a loss that is not a number stops the training",
    "push_to_hub": "upload the finished model's folder: hf upload NAME out/finetune/model",
    "ignore_data_skip": "rows go on where they were",
    "remove_unused_columns": "rows have no columns that are not used",
    "include_num_input_tokens_seen": "tokens are counted anyway",
    "activation_checkpointing": "say gradient_checkpointing",
    "loop": "the Trainer takes the same steps; the plain loop is recipes/experiments/"
    "training_loop.py of the repository",
}
