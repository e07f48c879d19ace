"""Rows that claims and exhibits of the digits share."""

import pytest

from digit_rows import made
from kappascope.lab.table import Table


@pytest.fixture(scope="module")
def kappa_tells() -> Table:
    return made(lambda k, s, noise: k + noise)
