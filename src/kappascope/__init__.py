"""A laboratory and clinic for the weight matrices of neural networks."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kappascope.components import Components, errors
    from kappascope.diagnosing import diagnose
    from kappascope.matrices import matrices

__version__ = "0.1.0"
__all__ = ["Components", "corrections", "diagnose", "errors", "matrices", "spectra", "theory"]

_HOMES = {
    "Components": "components",
    "diagnose": "diagnosing",
    "errors": "components",
    "matrices": "matrices",
}


def __getattr__(name: str) -> Any:
    """Load what is asked for when it is asked for: the command line starts without torch."""
    if name in _HOMES:
        return getattr(import_module(f"kappascope.{_HOMES[name]}"), name)
    if name in __all__:
        return import_module(f"kappascope.{name}")
    raise AttributeError(f"module 'kappascope' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
