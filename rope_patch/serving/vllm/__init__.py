"""vLLM plugin: each request is rotated by the profile of its own length."""
