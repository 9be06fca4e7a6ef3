"""Files, errors, progress and processes: what every part of the package uses."""
