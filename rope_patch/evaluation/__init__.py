"""Evaluation: retrieval through lm-eval, perplexity against position, and the report on both."""
