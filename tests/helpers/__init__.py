"""Helpers that several test folders share: tiny models, commands, processes, fixtures."""
