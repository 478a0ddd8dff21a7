"""The command line: every command is a thin wrapper around a function of the library."""

from __future__ import annotations

import os
import reprlib
import signal
import sys

import typer

from kvlab.cli.app import app

# isort: split
# Imported for the commands that they add, in the order of the help.
from kvlab.cli import study  # noqa: F401

# isort: split
from kvlab.cli import capacity, serve  # noqa: F401

# isort: split
from kvlab.cli import bench, compare, evaluation, report, testbed  # noqa: F401


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; a user's mistake is one line on standard error and exit code 2.

    With the environment variable ``KVLAB_TRACEBACK`` set, errors are raised instead.
    """
    command = typer.main.get_command(app)
    arguments = sys.argv[1:] if arguments is None else arguments
    # A job that is told to end cleans up as one that is interrupted.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        code = command.main(args=arguments or ["--help"], prog_name="kvlab", standalone_mode=False)
        if code == 130:
            # Typer has taken the interruption for itself and hands back no more than this.
            raise KeyboardInterrupt
    except BrokenPipeError:
        # The reader of our output has left, as `head` does.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except (ValueError, TypeError, ImportError, OSError) as error:
        if os.environ.get("KVLAB_TRACEBACK"):
            raise
        code = _complain(_in_words(error))
    except (KeyboardInterrupt, typer.Abort):
        code = _complain("interrupted; what was finished is kept", code=130)
    except Exception as error:
        # The command line parser's own errors, whichever click it is built on.
        if not hasattr(error, "format_message"):
            raise
        code = _complain(error.format_message())
    sys.exit(code or 0)


PATH = reprlib.Repr()
PATH.maxstring = 200
"""Characters of a path that an error shows; the middle of a longer one is left out."""


def _in_words(error: Exception) -> str:
    """Return what an error says; one of the system's own, which names no argument, names its path."""
    if not isinstance(error, OSError) or error.filename is None:
        return str(error)
    path = PATH.repr(os.fsdecode(error.filename))
    return f"path is {path}, which cannot be used ({error.strerror}); accepted: one that can be read, or written"


def _complain(message: str, code: int = 2) -> int:
    # Progress bars leave the cursor in their line.
    start = "\n" if code == 130 else ""
    print(f"{start}kvlab: {' '.join(message.split())}", file=sys.stderr)
    return code
