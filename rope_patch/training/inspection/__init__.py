"""Inspection of a recipe's data without training: lengths, duplicates, the rows it will give."""
