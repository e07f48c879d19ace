"""Claims about the pretrained checkpoints stand on what was run."""

from kappascope.lab.experiment import verdicts
from kappascope.lab.table import Table
from kappascope.studies.pretrained.study import STUDY


def test_a_claim_is_judged_although_measures_that_decide_nothing_were_not_run(
    partial_run: Table,
) -> None:
    found = {one["id"]: one for one in verdicts([STUDY], partial_run)["claims"]}
    assert found["pretrained.bottom-matters"]["interval"] is not None
    assert "(not run)" in found["pretrained.bottom-count"]["explanation"]
    assert found["pretrained.depth-grows"]["explanation"].startswith("Not measured")
