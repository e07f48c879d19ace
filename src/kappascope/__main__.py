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
    from kappascope.cli import told_alone

    spare = bytearray(2**20)
    try:
        _application().main()
    except Exception as error:  # out of memory, or of files: else the application tells of it
        spare.clear()
        sys.exit(told_alone(error))


def _application() -> ModuleType:
    """Load the application; signals wait until it takes them, and tells of them."""
    import signal

    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    from kappascope.cli import app

    return app


if __name__ == "__main__":
    main()
