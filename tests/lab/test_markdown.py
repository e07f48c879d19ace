"""The page of the studies: each with its origin, question, tables and verdicts."""

from pathlib import Path

from kappascope.lab.markdown import studies_page, study_pictures
from kappascope.lab.report import publications_of
from tiny_experiments import STUDY, TOY
from tiny_runs import complete


def test_a_study_stands_on_the_page_with_its_tables_and_claims(tmp_path: Path) -> None:
    study = STUDY.quickly()
    complete(study, tmp_path)
    page = studies_page(publications_of([tmp_path], [TOY, study]))
    assert "Of 1 claim, 0 hold" in page
    assert "## Doubling" in page and "Can it double?" in page
    assert "`kappascope study toy`: 2 trials (" in page
    assert "| loss | seconds |\n|---|---|\n" in page and "In the end." in page
    assert "- **undecided**: it learns (`toy.learns`, 0)" in page


def test_a_figure_stands_beside_the_page(tmp_path: Path) -> None:
    complete(STUDY.quickly(), tmp_path / "out")
    (tmp_path / "out" / "figures").mkdir()
    (tmp_path / "out" / "figures" / "toy.png").write_bytes(b"drawn")
    publications = publications_of([tmp_path / "out"], [STUDY])
    assert "![The figure of the study toy](figures/toy.png)" in studies_page(publications)
    assert list(study_pictures(publications)) == [("figures/toy.png", b"drawn")]


def test_experiments_of_the_paper_are_not_on_it(tmp_path: Path) -> None:
    complete(TOY, tmp_path)
    assert "No claim was judged." in studies_page(publications_of([tmp_path], [TOY]))
