"""Corrections of scale, of shape and of both, for the weights of any module.

Each is a frozen value with a pure form on ``(..., out, in)`` tensors, and attaches in one line:

    handle = Hybrid().attach(model, optimizer)     # ...train as before...
    handle.close()                                 # plain weights, the same function

A ``target`` says which spectrum is wanted: a number bounds kappa, a state dict gives the spectra of
its weights, a tensor has the singular values, and a function is asked for them once, with the
weight as it is when attached (so ``spectra.singular_values`` means the initial ones, and ``lambda
weight: known`` is the oracle of the paper's experiments). ``None`` is the default that each class
states; it needs no oracle.
"""

from kappascope.corrections import mup
from kappascope.corrections._targets import Target
from kappascope.corrections.caps import SingularValueBand, SpectralCap
from kappascope.corrections.correction import Correction, attach
from kappascope.corrections.directions import MagnitudeDirection, SpectralNormalization
from kappascope.corrections.handle import Handle
from kappascope.corrections.hybrid import Hybrid
from kappascope.corrections.multipliers import Multipliers, SingularValueMultipliers, scaled
from kappascope.corrections.penalties import (
    OrthogonalPenalty,
    PaperPenalty,
    SigmaMaxPenalty,
    SpectralPenalty,
    condition_penalty,
)
from kappascope.corrections.pins import ColumnNormPin, NormPin, RowNormPin
from kappascope.corrections.projections import (
    SingularValueBound,
    SpectralDecay,
    SVDCorrection,
    banded,
    toward_spectrum,
)
from kappascope.corrections.qk_clip import QKClip
from kappascope.corrections.starts import orthogonal_start
from kappascope.matrix.components import floored_condition_number

__all__ = [
    "ColumnNormPin",
    "Correction",
    "Handle",
    "Hybrid",
    "MagnitudeDirection",
    "Multipliers",
    "NormPin",
    "OrthogonalPenalty",
    "PaperPenalty",
    "QKClip",
    "RowNormPin",
    "SVDCorrection",
    "SigmaMaxPenalty",
    "SingularValueBand",
    "SingularValueBound",
    "SingularValueMultipliers",
    "SpectralCap",
    "SpectralDecay",
    "SpectralNormalization",
    "SpectralPenalty",
    "Target",
    "attach",
    "banded",
    "condition_penalty",
    "floored_condition_number",
    "mup",
    "orthogonal_start",
    "scaled",
    "toward_spectrum",
]
