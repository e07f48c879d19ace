"""The article's figures are drawn from rows, and its text names what there is."""

import re
from collections.abc import Mapping

import numpy as np
import pytest

from kappascope.lab.article import MARK, NUMBER, PICTURE
from kappascope.lab.experiment import studies
from kappascope.lab.heads import chance_log_kappa
from kappascope.lab.table import Table
from kappascope.paper.article import ARTICLE, SUMMARY
from kappascope.paper.review import all_claims

CLAIMS = {claim.id: claim for claim in all_claims()}
TEMPLATES = {
    "article": ARTICLE.template,
    "summary": SUMMARY.template,
    **{name: study.finding for name, study in studies().items()},
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_every_number_is_one_that_a_claim_measures(template: str) -> None:
    for name, path, *_ in NUMBER.findall(template):
        first, _, key = path.partition("/")
        measure = CLAIMS[name].measures[first]
        keys = {str(each) for each in measure} if isinstance(measure, Mapping) else {""}
        assert key in keys, f"{name} {path}"


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_every_claim_that_is_named_exists(template: str) -> None:
    names = [
        mark.rsplit(" ", 1)[0] for marks in MARK.findall(template) for mark in marks.split(", ")
    ]
    assert names and set(names) <= set(CLAIMS)


def test_every_figure_is_shown_with_what_is_seen() -> None:
    shown = {name: alt for alt, name in PICTURE.findall(ARTICLE.template)}
    assert set(shown) == set(ARTICLE.plots)
    assert all(alt == f"{{{{alt_{name}}}}}" for name, alt in shown.items())


def test_question_and_answer_have_150_words() -> None:
    lead = ARTICLE.template.split("![")[0]
    words = re.findall(r"\w+", lead.split("**Answer.**")[1].split("{{")[0])
    assert len(words) <= 150


def row(**columns: object) -> dict[str, object]:
    return {"stream": "own", **columns}


def rows_of(name: str) -> Table:
    random = np.random.default_rng(3)
    seeds = range(30)

    def error() -> float:
        return float(np.exp(random.normal()))

    if name == "lottery":
        made = [row(experiment="e1", size=d, seed=k, component="condition_number", error=error())
                for d in (32, 64) for k in seeds]  # fmt: skip
    elif name == "relaxation":
        made = [row(experiment="e9", size=128, seed=k, component=c, epoch=t, error=error(),
                    intervention="none" if t > 1000 else None)
                for c in ("condition_number", "row_norms") for t in (1, 10, 500, 1000, 5000)
                for k in seeds]  # fmt: skip
    elif name == "depth":
        made = [row(experiment="e7", intervention="equal rate", layer=0, depth=depth, seed=k,
                    epoch=epoch, level=None if epoch == 0 else 0.3, component="condition_number",
                    value=1 + error(), target=2.0)
                for depth in (1, 2, 3) for epoch in (0, None) for k in seeds]  # fmt: skip
    elif name == "scale":
        made = [row(experiment="e6", pairing="paired", component="row_norms", structure=s, norm=n,
                    strategy=strategy, seed=k, error=error())
                for s in ("gaussian", "low-rank") for n in (4.0, 8.0, None)
                for strategy in ("standard", "multipliers") for k in seeds]  # fmt: skip
    else:
        made = [row(experiment="gpt", stage=stage, optimizer=o, correction="alone", rate=rate,
                    width=64, kind="QK", matrix=f"head {h}", epoch=5, seed=k,
                    component="log_condition_number", value=chance_log_kappa(64) + error())
                for o in ("AdamW", "Muon") for h in range(3)
                for stage, rate, k in (("tune", 0.1, 0), ("tune", 0.2, 0), ("compare", 0.1, 0),
                                       ("compare", 0.1, 1))]  # fmt: skip
    return Table.of(made)


@pytest.mark.parametrize("name", ARTICLE.plots)
def test_a_figure_is_drawn_and_tells_its_numbers(name: str) -> None:
    drawn = ARTICLE.drawn(rows_of(name))
    assert list(drawn) == [name]
    [axes] = drawn[name].axes
    assert axes.get_xlabel() and axes.get_ylabel()
    assert any(str(line.get_gid()).startswith("told:") for line in axes.lines)
