"""Every claim of the teacher study is judged by its rows."""

from kappascope.lab.experiment import verdicts
from kappascope.lab.table import Table
from kappascope.studies.teacher.study import STUDY


def test_every_claim_is_judged(two_seeds: Table) -> None:
    claims = verdicts([STUDY], two_seeds)["claims"]
    assert len(claims) == len(STUDY.claims)
