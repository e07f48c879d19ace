"""For all tests of checkpoints: what imports modules when it is first done is done before."""

import pytest

import broken_files


@pytest.fixture(scope="session", autouse=True)
def _warm() -> None:
    broken_files.warm_up()
