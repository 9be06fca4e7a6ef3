"""Load, save and register extended models and adapters."""
