"""The result of a search: comparison, plot, summary and exported files."""
