"""Inference for measurements: prefix sharing, samples, their scores, and stored answers."""
