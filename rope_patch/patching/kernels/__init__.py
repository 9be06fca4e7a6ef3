"""This package's rotation inside a model's own attention."""
