"""Measure candidates: their fitness, the samples, and when to stop early."""
