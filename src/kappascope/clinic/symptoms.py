"""What rules are given and what they say: measurements, symptoms, and the register of rules.

A rule is one function, of a matrix under ``@rule`` or of the model under ``@model_rule``. Its name
with hyphens is its id, its docstring has its reasons, and the decorator says what it is concerned
with and which null it compares with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeAlias, TypeVar

from kappascope.clinic import Concern, Null, Severity
from kappascope.clinic.atlas import Atlas
from kappascope.clinic.examination import Examination
from kappascope.clinic.fresh import can_tell, is_random
from kappascope.clinic.moments import SwallowedStep
from kappascope.clinic.prescriptions import Flaw
from kappascope.clinic.vectors import Vector
from kappascope.model.attention import Product
from kappascope.model.chains import Chain
from kappascope.model.skipped import Skipped

FALSE_ALARM_RATE = 1e-3  # the share of fresh models that a rule may accuse


@dataclass(frozen=True)
class Symptom:
    """What a rule says; of the matrix that it was shown, unless ``subject`` and ``about`` tell.

    ``concern`` is that of the rule unless another is given; ``harm`` is a share that is lost.

    >>> Symptom("info", "all entries are zero").flaw is None
    True
    """

    severity: Severity
    evidence: str
    advice: str = ""
    flaw: Flaw | None = None  # what a correction could treat
    subject: str = ""
    about: tuple[Examination, ...] = ()
    concern: Concern | None = None
    harm: float | None = None
    null: Null | None = None


def warning_if(grave: bool) -> Severity:
    """Return a warning for what is grave, and a note for what is not.

    >>> warning_if(False)
    'info'
    """
    return "warning" if grave else "info"


@dataclass(frozen=True)
class Measurements:
    """All that was measured of a model: what a matrix is compared with, and shares its chance with.

    >>> Measurements(rows=(Examination("w", (8, 8), "float32", "ok"),) * 4).chance
    0.00025
    """

    rows: tuple[Examination, ...]
    products: tuple[Product, ...] = ()
    chains: tuple[Chain, ...] = ()
    unsound: tuple[Skipped, ...] = ()  # vectors that are not finite or cannot be read
    vectors: tuple[Vector, ...] = ()
    reference_vectors: tuple[Vector, ...] = ()
    swallowed: tuple[SwallowedStep, ...] = ()
    given_atlas: Atlas | None = None

    @property
    def chance(self) -> float:
        """How unlikely a matrix must be to be noticed among so many."""
        return FALSE_ALARM_RATE / max(1, len(self.rows) + len(self.products) + len(self.chains))

    @property
    def atlas(self) -> Atlas:
        """What trained matrices are like: as the user says, or else the package."""
        return self.given_atlas or Atlas.packaged()

    @cached_property
    def is_fresh(self) -> bool:
        """Whether most matrices that can tell look as initialised."""
        fresh = [is_random(row) for row in self.rows if can_tell(row)]
        return 2 * sum(fresh) >= len(fresh)

    def vector(self, name: str) -> Vector | None:
        """Return the vector of this name, if there is one."""
        return self._by_name.get(name)

    @cached_property
    def _by_name(self) -> dict[str, Vector]:
        return {vector.name: vector for vector in self.vectors}

    @cached_property
    def layers(self) -> int:
        """The number of layers, by the depths of the matrices."""
        return 1 + max((row.depth for row in self.rows if row.depth is not None), default=-1)

    @cached_property
    def moved(self) -> bool:
        """Whether some matrix is not that of the reference."""
        return any((row.errors or {}).get("overall_matrix") for row in self.rows)


MatrixRule: TypeAlias = Callable[[Examination, Measurements], Symptom | None]
ModelRule: TypeAlias = Callable[[Measurements], Iterator[Symptom | Skipped]]
Judge = TypeVar("Judge", MatrixRule, ModelRule)


@dataclass(frozen=True)
class ClinicRule(Generic[Judge]):
    """A rule: what it asks, what it is concerned with, and what it compares with."""

    judge: Judge
    concern: Concern
    null: Null


RULES: dict[str, ClinicRule[MatrixRule]] = {}
MODEL_RULES: dict[str, ClinicRule[ModelRule]] = {}


def rule(
    concern: Concern, null: Null = "none", rule_id: str = ""
) -> Callable[[MatrixRule], MatrixRule]:
    """Register a rule for every matrix; its name is its id, unless another is given."""

    def register(judge: MatrixRule) -> MatrixRule:
        RULES[rule_id or judge.__name__.replace("_", "-")] = ClinicRule(judge, concern, null)
        return judge

    return register


def model_rule(
    concern: Concern, null: Null = "none", rule_id: str = ""
) -> Callable[[ModelRule], ModelRule]:
    """Register a rule for the model as a whole; its name is its id, unless another is given.

    It may also say what it could not judge.
    """

    def register(judge: ModelRule) -> ModelRule:
        MODEL_RULES[rule_id or judge.__name__.replace("_", "-")] = ClinicRule(judge, concern, null)
        return judge

    return register
