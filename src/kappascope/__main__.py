"""`python -m kappascope` runs the command; `python -P -m` trusts no file of the current folder."""

import sys

from kappascope.system.imports import trusted


def main() -> None:
    """Run the command, which imports nothing from the current folder: a model may lie there."""
    sys.path[:] = trusted(sys.path)
    from kappascope.cli import app

    app.main()


if __name__ == "__main__":
    main()
