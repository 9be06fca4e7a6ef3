"""The rotation in Triton. Nothing here is imported before it is needed; see `ops/choosing.py`."""
