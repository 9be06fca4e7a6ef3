"""The training loss: the cross-entropy in chunks, and the terms that recipes add to it."""
