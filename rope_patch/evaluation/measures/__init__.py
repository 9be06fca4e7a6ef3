"""What an evaluation measures: tasks of lm-eval, perplexity, and speed."""
