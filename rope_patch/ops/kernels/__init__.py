"""The rotation in Triton; imported lazily by `ops/dispatch.py`."""
