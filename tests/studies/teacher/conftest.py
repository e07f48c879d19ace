"""A small run of the teacher study."""

from itertools import product

import pytest

from kappascope.lab.resume import ResumePoint
from kappascope.lab.table import Table
from kappascope.studies.teacher.model import ARCHITECTURES
from kappascope.studies.teacher.study import trials


@pytest.fixture(scope="session")
def two_seeds() -> Table:
    """The rows of two seeds: too few for a verdict, enough for every sentence and table."""
    kinds = ("fresh", ARCHITECTURES[0]), ("near", ARCHITECTURES[0]), ("near", ARCHITECTURES[6])
    rows = []
    for (start, one), optimizer, seed in product(kinds, ("sgd", "adam", "muon"), range(2)):
        setting = {
            "stage": "compare", "start": start, "depth": one.depth, "activation": one.activation,
            "variant": one.variant, "optimizer": optimizer, "learning_rate": 0.03, "steps": 60,
        }  # fmt: skip
        about = {"experiment": "teacher", "stream": "own", "seed": seed, **setting}
        found = trials(seed, ResumePoint(), **setting)
        rows += [{**about, **row} for row in found if "which" not in row]
    return Table.of(rows)
