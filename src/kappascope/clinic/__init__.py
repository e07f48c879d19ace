"""Examine the matrices of a model, find what is wrong, and say what to try."""

from typing import Literal, TypeAlias, get_args

Severity: TypeAlias = Literal["info", "warning", "critical"]
"""Worth knowing, but nothing to do; somebody should look; the model cannot work as it is."""

Extent: TypeAlias = Literal["auto", "full", "none"]
"""How much of the spectrum is taken: all of it up to a size, always, or never."""

SEVERITIES: tuple[Severity, ...] = get_args(Severity)  # the mildest first
MODULES = ("torch", "kappascope.clinic.diagnosing")  # what a worker needs
