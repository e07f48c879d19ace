"""Which correction treats which flaw of a model that is trained on, and code that runs.

A flaw is of scale (norms), of rank (no spectrum left to correct by a gradient), or of shape (the
spectrum). For shape nothing is prescribed: a smaller kappa was not shown to make a better matrix or
a lower loss (docs/findings.md). A correction that reaches its own aim need not lower a loss, so
every prescription ends in a comparison with a run without it.
"""

from __future__ import annotations

import glob
import math
from dataclasses import dataclass
from enum import Enum

from kappascope.clinic.examination import Examination
from kappascope.model.names import is_table
from kappascope.theory import GaussianNull


class Flaw(Enum):
    """What is wrong with a matrix, as far as a correction could treat it."""

    SCALE = "scale"
    SHAPE = "shape"
    RANK = "rank"


# Kinds for which no correction is advised, whatever is found, and why.
NO_MAPS = ("basis", "table", "adapter")  # whose kappa and rank nobody asks for
LEFT_ALONE = {
    "embedding": "it is looked up, not multiplied",
    "head": "its rows scale logits, and factors there hurt (Velikanov et al. 2026)",
    "adapter": "it is small by design, and is merged in the end",
    "router": "it chooses experts, and its scale says how sharply",
    "state": "it is a table of rates, not a linear map",
    "table": "it is a table of constants, not a linear map",
    "basis": "it is a fixed basis of waves",
}


def kind_of(row: Examination) -> str:
    """Return the kind of a matrix, or "table" or "basis" if it is not learned as a map is.

    >>> kind_of(Examination("h.0.attn.bias", (8, 8), "float32", "ok"))  # GPT-2's causal mask
    'table'
    """
    if row.sinusoidal:
        return "basis"
    by_name = row.kind != "convolution" and (is_table(stored_name(row)) or _is_mask(row))
    unknown = row.kind in ("other", "convolution")
    return "table" if unknown and (by_name or _has_equal_rows(row)) else row.kind


def is_left_alone(row: Examination) -> bool:
    """Tell whether nothing should be done to a matrix, whatever is found.

    >>> is_left_alone(Examination("wte.weight", (8, 4), "float32", "ok", kind="embedding"))
    True
    """
    return kind_of(row) in LEFT_ALONE


def _is_mask(row: Examination) -> bool:
    """Tell whether all entries are 0 or 1: only then is their mean that of their squares."""
    norm, mean = row.frobenius_norm, row.entry_mean
    if not norm or not mean:
        return False
    # a product, for a power raises an error where the square is beyond float64's range
    return math.isclose(mean, norm * (norm / math.prod(row.shape)), rel_tol=1e-9)


def _has_equal_rows(row: Examination) -> bool:
    """Tell whether all rows are alike, as in norm layers and blurs, but never by training.

    Of rank one, they are if their norms are, to six digits.
    """
    spread = row.row_norms.cv if row.row_norms is not None else None
    return row.effective_rank == 1 < row.shape[0] and spread is not None and spread < 1e-6


def stored_name(row: Examination) -> str:
    """Return the name of the weight that holds a matrix: of a part ``name[q]``, the whole.

    >>> stored_name(Examination("attn.qkv[q]", (8, 8), "float32", "ok", part_of="attn.qkv"))
    'attn.qkv'
    """
    return (row.part_of or row.name).rstrip("'")  # which tell apart what would have the same name


# What was measured of each; the numbers are those of its docstring and benchmarks.
MEASURED = {
    "Multipliers": "they correct norms, not kappa; without their decay factors drift apart",
    "NormPin": "it fixes the scale, which can then no longer be learned",
    "SingularValueBound": "it guarantees a bound on kappa; a gain in loss has not been shown",
}


@dataclass(frozen=True)
class Prescription:
    """A correction by name, the code that attaches it, and a word on both; or none of it."""

    correction: str | None
    snippet: str
    advice: str


NO_PRESCRIPTION = Prescription(None, "", "")


def prescribe(flaw: Flaw, *rows: Examination) -> Prescription:
    """Return what to try for a matrix, or for several of one kind that act together.

    >>> from dataclasses import replace
    >>> row = Examination("fc.weight", (32, 8), "float32", "ok")
    >>> print(prescribe(Flaw.RANK, row).snippet)
    from kappascope import corrections
    handle = corrections.SingularValueBound(kappa=3.1).attach(model, optimizer, where='fc.weight')
    # train as before, compare with a run without it, then:
    handle.close()
    >>> prescribe(Flaw.SCALE, replace(row, kind="embedding")).advice
    'leave it alone: it is looked up, not multiplied'
    >>> prescribe(Flaw.SHAPE, row).correction is None
    True
    """
    kind = kind_of(rows[0])
    if flaw is Flaw.SHAPE:
        return Prescription(None, "", "no correction of kappa was shown to lower a loss")
    if kind in LEFT_ALONE:
        return Prescription(None, "", f"leave it alone: {LEFT_ALONE[kind]}")
    correction, arguments = _choice(flaw, rows[0].shape, kind)
    if joined := next((row for row in rows if _is_joined(row)), None):
        return Prescription(None, "", _SPLIT.format(stored_name(joined), correction))
    where = [glob.escape(name) for name in dict.fromkeys(map(stored_name, rows))]
    selected = repr(where if len(where) > 1 else where[0])
    call = f"corrections.{correction}({arguments}).attach(model, optimizer, where={selected})"
    advice = f"try {correction} and measure: {MEASURED[correction]}"
    return Prescription(correction, _SNIPPET.format(call=call), advice)


def _is_joined(row: Examination) -> bool:
    """Tell whether it is one of several below one another.

    Those of a stack are treated one by one.
    """
    label = row.name.rstrip("']").rpartition("[")[2]
    return row.part_of is not None and not label.isdigit()


_SPLIT = "corrections act on {} as a whole: split it into layers of its own before you try {}"
_SNIPPET = """\
from kappascope import corrections
handle = {call}
# train as before, compare with a run without it, then:
handle.close()"""


def _choice(flaw: Flaw, shape: tuple[int, int], kind: str) -> tuple[str, str]:
    """Return the correction and its arguments."""
    # recurrent layers keep references to their weights: factors cannot be put in front of them
    plain = kind != "recurrent"
    if flaw is Flaw.RANK:
        return "SingularValueBound", f"kappa={_usual(shape):.2g}"
    # one matrix was chosen by name: it is not left out because another could undo its factors
    return ("Multipliers", "gauge=True") if plain else ("NormPin", "")


def _usual(shape: tuple[int, int]) -> float:
    """Return the kappa that 19 of 20 random matrices of this shape stay below."""
    return float(GaussianNull(*shape).quantile(0.95)) if min(shape) > 1 else 1.0
