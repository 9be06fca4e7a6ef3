"""A lock on a folder, so that one run at a time writes there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rope_patch.utils.processes import Processes

LOCK = ".lock"


class FolderLock:
    """Keep other runs out of a folder.

    The operating system holds the lock on the folder's empty file `.lock`, so it ends with the
    process, however that ends. The file stays.

    Args:
        folder: The folder; made by `acquire` if missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock: Any = None

    @property
    def is_held(self) -> bool:
        """Return whether this object holds the lock."""
        return self._lock is not None

    def acquire(self) -> None:
        """Take the lock, or raise at once; do nothing if it is held already.

        Raises:
            ValueError: Another run holds it.
            OSError: The folder cannot be written to, or its file system has no locks.
        """
        if self.is_held:
            return
        from filelock import FileLock, Timeout

        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self._folder / LOCK)
            lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(
                f"another process works in {self._folder}: wait for it to end, or give another "
                "folder"
            ) from None
        except (OSError, NotImplementedError) as error:
            raise OSError(
                f"{self._folder} cannot be locked against other runs ({error}): expected a folder "
                "that can be written to, on a file system with locks; give another folder"
            ) from error
        self._lock = lock

    def release(self) -> None:
        """Let other runs into the folder."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None


@contextlib.contextmanager
def lock_folder(folder: Path, processes: Processes) -> Iterator[None]:
    """Hold a folder's lock in the main process, for all processes of a run.

    Args:
        folder: The folder; made if missing.
        processes: Those of the run. All of them have to come here.

    Raises:
        ValueError: See `FolderLock.acquire`; in every process.
        OSError: Likewise.
    """
    lock = FolderLock(folder)
    processes.run_on_main(lock.acquire)
    try:
        yield
    finally:
        lock.release()
