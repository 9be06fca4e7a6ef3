"""Benchmarks of the kernels and of prefix sharing."""
