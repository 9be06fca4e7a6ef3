"""The folder from which a killed run goes on to the result that it would have had.

Evaluations, searches, recommendations, extensions, trainings and the lab all take minutes to days,
and are killed. The same command then goes on: what was measured is not measured again, and the
result is that of a run that was never killed. Every such run has a `RunFolder`:

- A lock: one run at a time writes to the folder. The operating system holds it, so a kill ends it.
- An identity: everything that results depend on, as plain data. A folder that was begun with
  another one is refused, with each difference in one line; nothing is changed there.
- Results: a JSON file each, written as a whole and with a checksum. One that is damaged is made
  again, with a warning.
- A journal: a file that grows by lines, each with a checksum and on the disk before the next
  measurement begins. A line that a kill cut short counts as not written.
- The time: seconds of each step, with those of runs that were killed, noted every few seconds.

What goes in: a folder, and the identity. What comes out: what earlier runs have left there. The
rooms decide what is stored under which name, and say what a refusal means for their command.

Results that many runs share have no identity of the run. Each says itself what it depends on: the
answers of evaluations by their key (`inference.answers`), the lab's cells by their settings.
"""

from rope_patch.utils.lazy_exports import export_lazily

export_lazily(__name__, {"journal": "check_lines JournalFile", "run_folder": "RunFolder WallClock"})
