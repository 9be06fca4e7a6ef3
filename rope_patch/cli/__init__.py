"""The command line `rope-patch`."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rope_patch.cli.runtime import (
    CRASHED,
    EXIT_CODE,
    REFUSED,
    interruptible,
    messages,
    unread_output,
)
from rope_patch.utils.errors import printable

if TYPE_CHECKING:
    from rope_patch.cli.commands import app as app

logger = logging.getLogger("rope_patch")


def main() -> None:
    """Run the command line."""
    run(_command_line)


def run(command: Callable[[], Any]) -> None:
    """Run a command; a failure is one clear line on stderr and a non-zero exit.

    What is no refusal is a defect of this package: it ends with a traceback, and with another exit
    code than a refusal or a verdict.
    """
    with interruptible(), unread_output(), messages():
        try:
            command()
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
            sys.exit(EXIT_CODE)
        except (ValueError, TypeError, OSError) as error:
            logger.debug("the error's traceback:", exc_info=True)
            print(f"error: {printable(error)}", file=sys.stderr)
            sys.exit(REFUSED)
        except Exception:
            traceback.print_exc()
            sys.exit(CRASHED)


def _command_line() -> None:
    """Import the commands, which Ctrl-C may interrupt already, and run the one that was typed."""
    from rope_patch.cli.commands import app

    app()


if not TYPE_CHECKING:

    def __getattr__(name):
        """Import `app` on first use, so that `main` can handle Ctrl-C before anything else."""
        if name == "app":
            from rope_patch.cli.commands import app

            return app
        raise AttributeError(f"module 'rope_patch.cli' has no attribute {name!r}")
