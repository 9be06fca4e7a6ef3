"""The work folder: the identity of an extension, and one sealed result file for each step."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from rope_patch.runs.run_folder import CLOCK, RunFolder
from rope_patch.utils import checksums
from rope_patch.utils.errors import Refused
from rope_patch.utils.provenance import versions

logger = logging.getLogger("rope_patch")

FORMAT = "rope_patch.extend/1"
WORK = "work"
_IDENTITY = "request.json"
_GROWING = "budget"  # the key that may change until a step that measures has ended
_MEASURING = ("recommend", "train", "compare", "publish")


class WorkFolder:
    """The folder of an extension, which the same command continues from.

    Args:
        out: The folder of everything that is written.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.path = out / WORK
        self.run_folder = RunFolder(self.path)

    def require_same_request(self, identity: dict[str, Any]) -> None:
        """Write the identity of an extension, or raise unless the folder holds the same one.

        Args:
            identity: Everything that results depend on, as JSON data.

        Raises:
            ValueError: The folder holds something else, or an extension by other arguments. Until
                a step that measures has ended, the budget may be another one.
        """
        self.run_folder = RunFolder(self.path, identity)
        path = self.path / _IDENTITY
        if not path.is_file():
            entries = [each for each in self.out.glob("*") if each.name != WORK]
            if entries or any(each.name != ".lock" for each in self.path.glob("*")):
                raise Refused(
                    f"{self.out} is not empty and holds no extension ({path} is missing): expected "
                    "a new folder; give another --out"
                )
            self._write_identity(versions())
            return
        try:
            stored = self.run_folder.read(_IDENTITY, format=FORMAT)
        except ValueError as error:
            raise Refused(
                f"{path}: {error}; bring it back from a copy, or give another --out"
            ) from error
        differences = self.run_folder.differences(stored["identity"])
        if differences.keys() == {_GROWING} and not self._has_results():
            # The budget was too small for anything, and what was measured is kept in any case.
            self._write_identity(stored["versions"])
            (self.path / CLOCK).unlink(missing_ok=True)
        elif differences:
            raise Refused(
                f"cannot continue {self.out}, it holds an extension by other arguments: "
                f"{'; '.join(differences.values())}. Give those again, or another --out; nothing "
                "was changed there"
            )
        if stored["versions"] != versions():
            logger.warning(
                "%s began with other versions (%s): finished steps are not repeated",
                self.out,
                ", ".join(f"{name} {version}" for name, version in stored["versions"].items()),
            )

    def _write_identity(self, versions: dict[str, str]) -> None:
        body = {"format": FORMAT, "identity": self.run_folder.identity, "versions": versions}
        self.run_folder.write(_IDENTITY, body)

    def _has_results(self) -> bool:
        """Return whether a step that measures has ended."""
        return any((self.path / f"{step}.json").is_file() for step in _MEASURING)

    def read(self, step: str) -> dict[str, Any] | None:
        """Return a step's result, or None if it is missing or damaged."""
        return self.run_folder.find(f"{step}.json", "made again", format=FORMAT, step=step)

    def write(
        self, step: str, result: dict[str, Any], seconds: float, used: float
    ) -> dict[str, Any]:
        """Write a step's result at once, and return it as `read` does.

        Args:
            step: The step's name.
            result: JSON data.
            seconds: Wall time of the step, with that of runs that were killed.
            used: Seconds that the step needs where nothing kills it.
        """
        body = checksums.json_safe(
            {"format": FORMAT, "step": step, "seconds": seconds, "used": used, "result": result}
        )
        self.run_folder.write(f"{step}.json", body)
        return self.run_folder.read(f"{step}.json")
