"""Examine the matrices of a model, find what is wrong, and say what to try."""

import json
import sys
from importlib.resources import files as resources
from typing import Any, Literal, TypeAlias, get_args

from kappascope.system import files

Severity: TypeAlias = Literal["info", "warning", "critical"]
"""Worth knowing; somebody should look; the model cannot work as it is."""

Concern: TypeAlias = Literal["defect", "harm", "observation"]
"""Broken, never trained, dead or double; hurts quantization, pruning, merging or training on;
nothing to do."""

Null: TypeAlias = Literal["none", "chance", "trained", "start"]
"""What a rule compares with: nothing, random matrices, trained matrices, how training begins."""

Extent: TypeAlias = Literal["auto", "full", "none"]
"""How much of the spectrum is taken: all of it up to a size, always, or never."""

Order: TypeAlias = Literal[
    "findings", "kappa", "chance", "rank", "stable", "alpha", "moved", "size", "name"
]
"""What matrices are listed by: the largest first, but for what is worst where it is small."""

SEVERITIES: tuple[Severity, ...] = get_args(Severity)  # the mildest first
CONCERNS: tuple[Concern, ...] = get_args(Concern)  # what can be acted on first
SCHEMA = "kappascope.diagnosis/2"
MODULES = ("torch", "kappascope.clinic.diagnose")  # what a worker needs


def schema() -> dict[str, Any]:
    """Return the JSON schema of a diagnosis, as it is in the package.

    >>> schema()["title"] == SCHEMA
    True
    """
    text = resources(__name__).joinpath("diagnosis.schema.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def blank_document(source: str) -> dict[str, Any]:
    """Return the document of a diagnosis that examined nothing; torch need not be loaded for it.

    >>> blank_document("toy.pt")["summary"]["verdict"]
    'Nothing could be examined.'
    """
    # a torch that is not loaded by now may be one that cannot be
    known = files.environment() if "torch" in sys.modules else files.unloaded_environment()
    rows = "matrices", "products", "chains", "findings", "logits", "swallowed", "files"
    lists = *rows, "skipped", "failed"
    return {
        "schema": SCHEMA,
        "source": source,
        "reference": None,
        **{name: [] for name in lists},
        "summary": {
            **dict.fromkeys(("matrices", "analysed", "failed", "skipped"), 0),
            "by_severity": dict.fromkeys(SEVERITIES, 0),
            "by_concern": dict.fromkeys(CONCERNS, 0),
            "verdict": "Nothing could be examined.",
        },
        # float64, whatever the matrices are stored in
        "provenance": {**known, "dtype": "float64", "notes": []},
    }
