"""Examine the matrices of a model, find what is wrong, and say what to try."""

import sys
from typing import Any, Literal, TypeAlias, get_args

from kappascope.system import files

Severity: TypeAlias = Literal["info", "warning", "critical"]
"""Worth knowing, but nothing to do; somebody should look; the model cannot work as it is."""

Extent: TypeAlias = Literal["auto", "full", "none"]
"""How much of the spectrum is taken: all of it up to a size, always, or never."""

SEVERITIES: tuple[Severity, ...] = get_args(Severity)  # the mildest first
SCHEMA = "kappascope.diagnosis/1"
MODULES = ("torch", "kappascope.clinic.diagnose")  # what a worker needs


def blank_document(source: str) -> dict[str, Any]:
    """Return the document of a diagnosis that examined nothing; torch need not be loaded for it.

    >>> blank_document("toy.pt")["summary"]["verdict"]
    'Nothing could be examined.'
    """
    # a torch that is not loaded by now may be one that cannot be
    known = files.environment() if "torch" in sys.modules else files.unloaded_environment()
    lists = "matrices", "products", "chains", "findings", "skipped", "failed"
    return {
        "schema": SCHEMA,
        "source": source,
        "reference": None,
        **{name: [] for name in lists},
        "summary": {
            **dict.fromkeys(("matrices", "analysed", "failed", "skipped"), 0),
            "by_severity": dict.fromkeys(SEVERITIES, 0),
            "verdict": "Nothing could be examined.",
        },
        # float64, whatever the matrices are stored in
        "provenance": {**known, "dtype": "float64", "notes": []},
    }
