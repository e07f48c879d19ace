"""A laboratory and clinic for the weight matrices of neural networks."""

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from kappascope.system.forks import LOADING

if TYPE_CHECKING:
    from kappascope import corrections, theory
    from kappascope.clinic.diagnose import diagnose
    from kappascope.clinic.unlearned import unlearned
    from kappascope.matrix import spectra
    from kappascope.matrix.components import Components, errors
    from kappascope.model.matrices import matrices
    from kappascope.monitor.audit import audit
    from kappascope.monitor.monitor import Monitor
    from kappascope.refusal import Refusal

__version__ = "0.2.0"
__all__ = [
    "Components", "Monitor", "Refusal", "audit", "corrections", "diagnose", "errors", "matrices",
    "spectra", "theory", "unlearned",
]  # fmt: skip

# Where each public name is defined; without a name behind the colon it is the module itself.
_HOMES = {
    "Components": "kappascope.matrix.components:Components",
    "Monitor": "kappascope.monitor.monitor:Monitor",
    "Refusal": "kappascope.refusal:Refusal",
    "audit": "kappascope.monitor.audit:audit",
    "corrections": "kappascope.corrections:",
    "diagnose": "kappascope.clinic.diagnose:diagnose",
    "errors": "kappascope.matrix.components:errors",
    "matrices": "kappascope.model.matrices:matrices",
    "spectra": "kappascope.matrix.spectra:",
    "theory": "kappascope.theory:",
    "unlearned": "kappascope.clinic.unlearned:unlearned",
}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first asked for: the command starts without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'kappascope' has no attribute {name!r}")
    with LOADING:
        return resolve_name(_HOMES[name])


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
