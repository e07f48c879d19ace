"""`python -m kappascope` is the command."""

from kappascope.cli import main

if __name__ == "__main__":
    main()
