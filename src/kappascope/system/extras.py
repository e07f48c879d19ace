"""What is not part of the light core: optional packages, and plug-ins that others have installed.

A plug-in is an entry point of a package that the user has installed with pip. Groups:
``kappascope.rules``, ``kappascope.readers`` and ``kappascope.sinks`` (docs/plugins.md).
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from kappascope.refusal import Refusal

PLUGINS = {"rules": "rule", "readers": "reader", "sinks": "sink"}  # what a group offers


def optional(module: str, extra: str) -> Any:
    """Import a module of an optional extra; the refusal says how to install it.

    >>> optional("json", "lab").__name__
    'json'
    >>> optional("no_such_module", "lab")
    Traceback (most recent call last):
    kappascope.refusal.Refusal: no_such_module: is not installed (pip install 'kappascope[lab]')
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:  # it is there, and lacks something else
            raise
        advice = f"pip install 'kappascope[{extra}]'"
        raise Refusal(5, error.name, "is not installed", advice) from error


@cache
def plugins(group: str) -> dict[str, Any]:
    """Load what installed packages offer in a group, by name; what cannot be loaded is refused."""
    found = {}
    for entry in entry_points(group=f"kappascope.{group}"):
        try:
            found[entry.name] = entry.load()
        except Exception as error:
            wrong = f"cannot be loaded: {type(error).__name__}: {error}"
            advice = "mend or uninstall the package that offers it"
            raise Refusal(5, f"plug-in {entry.value}", wrong, advice) from error
    return found


def offered(group: str) -> list[tuple[str, str]]:
    """List the plug-ins of a group, each with the object that it names; none of them is loaded.

    >>> offered("no such group")
    []
    """
    return sorted((entry.name, entry.value) for entry in entry_points(group=f"kappascope.{group}"))
