"""``kappascope findings``: pages from trials that were run before."""

from pathlib import Path

from kappascope.paper import review


def test_findings_are_written_from_the_trials_and_nothing_is_written_elsewhere(
    run, tmp_path: Path
) -> None:
    results, docs = tmp_path / "results", tmp_path / "docs"
    assert run("findings", results, "--docs", docs)[0] == 2
    assert run("reproduce", 1, "--quick", "--jobs", 0, "--out", results)[0] == 0
    assert run("findings", results, "--docs", docs)[0] == 2
    docs.mkdir()
    page = f"# Paper\n{review.BEGIN}\n{review.END}\n"
    (docs / "paper.md").write_text(page)
    code, output, errors = run("findings", results, "--docs", docs)
    assert code == 0 and "findings.md" in output
    assert "left out of the article: e1.norms-flat was not judged" in errors
    assert "`e1.small`" in (docs / "verdicts.md").read_text()
    assert "# What the optimizer learns last" in (docs / "findings.md").read_text()
    assert "| Q1 |" in (docs / "paper.md").read_text()
    names = sorted(path.name for path in docs.iterdir())
    assert names == ["findings.md", "paper.md", "verdicts.md"]


def test_findings_of_studies_are_tables_figures_and_verdicts(run, tmp_path: Path) -> None:
    docs, paper, nets = (tmp_path / name for name in ("docs", "paper", "nets"))
    docs.mkdir()
    (docs / "paper.md").write_text(f"# Paper\n{review.BEGIN}\n{review.END}\n")
    assert run("reproduce", 1, "--quick", "--jobs", 0, "--out", paper)[0] == 0
    assert run("study", "toy", "--jobs", 0, "--out", nets)[0] == 0
    assert run("findings", paper, nets, "--docs", docs)[0] == 0
    page = (docs / "studies.md").read_text()
    assert "| loss | seconds |" in page and "**holds**: it learns (`toy.learns`, 0)" in page
    assert "`toy.learns`" in (docs / "verdicts.md").read_text()
