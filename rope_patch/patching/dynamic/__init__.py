"""Length-dependent rotation under a key-value cache."""
