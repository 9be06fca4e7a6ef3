"""Fine-tune a model for a longer context, from a recipe."""
