"""The page of the studies: each with its origin, question, tables and verdicts."""

from dataclasses import replace
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


def test_the_page_opens_with_what_every_study_asked_and_found(tmp_path: Path) -> None:
    study = STUDY.quickly()
    complete(study, tmp_path)
    publications = publications_of([tmp_path], [study])
    opening = studies_page(publications).split("## How to read this page")[0]
    assert "**[Doubling](#doubling).** *Can it double?*\nNot yet: the loss is" in opening
    assert "(`toy.learns`)" in opening


def test_a_finding_that_rows_do_not_bear_out_is_not_told(tmp_path: Path) -> None:
    study = replace(STUDY.quickly(), finding="It doubles [[toy.learns holds]].")
    complete(study, tmp_path)
    page = studies_page(publications_of([tmp_path], [study]))
    assert "It doubles" not in page
    assert "Not told: toy.learns is undecided, and the article says that it holds." in page


def test_a_list_in_the_question_of_a_study_stays_a_list(tmp_path: Path) -> None:
    listed = "Study.\n\nWhich?\n\n- ``one``: the\n  first;\n- ``two``."
    study = replace(STUDY.quickly(), question=listed)
    complete(study, tmp_path)
    page = studies_page(publications_of([tmp_path], [study]))
    assert "*Which?*" in page and "\n\n- `one`: the first;\n- `two`.\n\n" in page


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
