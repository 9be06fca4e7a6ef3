"""Runnable recipes: short scripts that make what the tests and examples use."""
