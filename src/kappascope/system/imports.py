"""Keep strangers' files out of what is imported: models often lie in the current folder.

Python looks for modules in the current folder, or beside the script it was started with, before
it looks among its own: a ``torch.py`` that came with a checkpoint would be run. This page loads
nothing that is not part of the interpreter, so that the command can use it first.
"""

from __future__ import annotations

import os
import site
import sys

HOME = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))


def trusted(entries: list[str]) -> list[str]:
    """Drop current folder, script's folder and relative entries from a module search path.

    The folder of this package always stays, and so do those of Python and of what is installed.

    >>> trusted(["", ".", "lib", os.getcwd(), HOME]) == [HOME]
    True
    """
    kept = {HOME, *map(os.path.realpath, _installed())}
    dropped = {os.path.realpath(folder) for folder in (_START, _here(), _script())} - kept
    return [
        entry
        for entry in entries
        if os.path.isabs(entry) and os.path.realpath(entry) not in dropped
    ]


def trusted_environment() -> dict[str, str]:
    """Return an environment in which Python does not trust the current folder.

    >>> trusted_environment()["PYTHONSAFEPATH"]
    '1'
    """
    folders = trusted(os.environ.get("PYTHONPATH", "").split(os.pathsep))
    programs = filter(os.path.isabs, os.environ.get("PATH", os.defpath).split(os.pathsep))
    changed = {
        "PATH": os.pathsep.join(programs),
        "PYTHONSAFEPATH": "1",
        **({"PYTHONPATH": os.pathsep.join(folders)} if folders else {}),
    }
    return {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"} | changed


def _here() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return os.devnull


def _script() -> str:
    """Return the folder of the program that runs, which Python puts first on the path."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return os.path.dirname(os.path.realpath(file)) if file else os.devnull


def _installed() -> list[str]:
    """Return the folders of the standard library and of packages, where `python -m` runs files."""
    user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return [os.path.dirname(os.__file__), *site.getsitepackages(), *user]


_START = _here()  # `python -m` puts it on the path, and the program may leave it
