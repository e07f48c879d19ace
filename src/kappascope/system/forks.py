"""What a fork does to locks: a child has no thread but its own, and would wait for others for ever.

Locks that another thread holds at a fork stay held in the child. A fork waits until modules are
loaded; the locks of cached properties, which Python has before 3.12, are made anew.
"""

import os
import sys
from functools import cached_property
from threading import RLock

LOADING = RLock()
"""Held by a thread that loads modules of this package; a fork waits for it."""


def free_cached_properties() -> None:
    """Give the cached properties of this package locks that nobody holds."""
    if sys.version_info >= (3, 12):  # they have none any more
        return
    for name, module in list(sys.modules.items()):
        if name.startswith("kappascope."):
            for kind in list(vars(module).values()):
                for member in vars(kind).values() if isinstance(kind, type) else ():
                    if isinstance(member, cached_property):
                        vars(member)["lock"] = RLock()  # an attribute unknown to 3.12


def _forked() -> None:
    LOADING.release()
    free_cached_properties()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=LOADING.acquire, after_in_parent=LOADING.release, after_in_child=_forked
    )
