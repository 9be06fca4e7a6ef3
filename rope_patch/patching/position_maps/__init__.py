"""Attention at mapped positions: the regions of a `PositionMap`, computed inside a live model."""
