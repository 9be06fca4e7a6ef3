"""Record what a checkout does, and compare two records, before and after code moves.

Comes in: the rope_patch that the interpreter imports, of this revision or another. Goes out: a
folder with what commands print and write (`cases`), frequencies, logits and exports (`numbers`),
saved folders (`saved`), and runs that were killed (`interrupted`) and then continued (`continued`).
docs/contributing.md has the commands. Open `cases.py` first: a new command is a line there.
"""
