"""Extend encodings that do not rotate: tables of positions, and biases on the logits."""
