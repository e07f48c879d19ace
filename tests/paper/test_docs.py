"""Pages of the documentation are written from what runs found, and from nothing else."""

from pathlib import Path

from kappascope.lab.report import publications_of
from kappascope.paper.docs import pages
from kappascope.paper.review import BEGIN, END
from tiny_experiments import TOY
from tiny_runs import complete


def test_only_what_runs_lead_to_is_written(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "paper.md").write_text(f"{BEGIN}{END}")
    results = tmp_path / "results"
    complete(TOY, results)
    written, pictures, left_out = pages(publications_of([results], [TOY]), docs)
    assert {path.name for path in written} == {"paper.md", "findings.md", "verdicts.md"}
    assert not pictures
    assert "e1.norms-flat was not judged" in left_out
