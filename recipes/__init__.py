"""Recipes as files, and `finetune.py`, which launchers start by this package's name."""
