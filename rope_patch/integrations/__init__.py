"""Patch models within other packages' trainers: transformers' and TRL's, and axolotl."""
