"""A laboratory and clinic for the weight matrices of neural networks."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kappascope.clinic.diagnosing import diagnose
    from kappascope.components import Components, errors
    from kappascope.matrices import matrices
    from kappascope.refusals import Refusal

__version__ = "0.1.0"
__all__ = [
    "Components", "Refusal", "corrections", "diagnose", "errors", "matrices", "spectra", "theory",
]  # fmt: skip

_HOMES = {
    "Components": "components",
    "Refusal": "refusals",
    "diagnose": "clinic.diagnosing",
    "errors": "components",
    "matrices": "matrices",
}


class _Package(ModuleType):
    """Keeps a function public whose module has its name: loading that would put it in its place."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    """Load what is asked for when it is asked for: the command line starts without torch."""
    if name in _HOMES:
        return getattr(import_module(f"kappascope.{_HOMES[name]}"), name)
    if name in __all__:
        return import_module(f"kappascope.{name}")
    raise AttributeError(f"module 'kappascope' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
