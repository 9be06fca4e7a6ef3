"""Score answers and keep them: shared prefixes, samples, journals."""
