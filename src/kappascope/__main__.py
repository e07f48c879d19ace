"""`python -m kappascope` runs the command; `python -P -m` trusts no file of the current folder."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from kappascope.system.imports import trusted

if TYPE_CHECKING:
    from types import ModuleType


def main() -> None:
    """Run the command, which imports nothing from the current folder: a model may lie there."""
    sys.path[:] = trusted(sys.path)
    spare = bytearray(2**20)
    try:
        _application().main()
    except Exception as error:  # out of memory, or of files: else the application tells of it
        spare.clear()
        sys.exit(_told_alone(error))


def _application() -> ModuleType:
    """Load the application; signals wait until it takes them, and tells of them."""
    import signal

    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    from kappascope.cli import app

    return app


def _told_alone(error: Exception) -> int:
    """Write the line and the document of an error, and give its exit code; nothing is loaded."""
    told = f"{type(error).__name__}: {error}".removesuffix(": ")[:100]
    wrong = "".join(letter for letter in told if letter.isprintable() and letter not in '"\\')
    advice = "free memory, raise the limits that `ulimit -a` shows, or install it anew"
    if "--json" in sys.argv:
        fields = f'"code": 5, "given": "kappascope", "wrong": "{wrong}", "advice": "{advice}"'
        sys.stdout.write(f'{{"error": {{{fields}}}}}\n')
    sys.stderr.write(f"kappascope: error: kappascope: {wrong} ({advice})\n")
    return 5


if __name__ == "__main__":
    main()
