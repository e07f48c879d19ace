"""The tables that the commands of the laboratory end with."""

from types import SimpleNamespace
from typing import Any

import pytest

from kappascope.cli import _laboratory


def claim(experiment: str, verdict: str) -> dict[str, Any]:
    return {"experiment": experiment, "verdict": verdict}


def figure(id: str, what: str) -> dict[str, Any]:
    about = {"id": id, "experiment": id.partition("/")[0], "what": what}
    return {**about, "printed": "0.13", "measured": 0.131, "matches": True}


def test_verdicts_are_counted_for_each_experiment_and_for_several(
    capsys: pytest.CaptureFixture[str],
) -> None:
    experiments: Any = [SimpleNamespace(id=f"e{n}", heading=f"{n} Title") for n in (1, 2)]
    claims = [
        claim("e1", "holds"),
        claim("e1", "holds"),
        claim("e2", "fails"),
        claim("all", "holds"),
    ]
    figures = [
        {"experiment": "e1", "matches": True},
        {"experiment": "e2", "matches": False, "agreement": "not measured: no rows"},
    ]
    _laboratory._show_verdicts(experiments, {"claims": claims, "figures": figures})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["1", "Title", "2", "0", "0", "0", "1", "of", "1"] in lines
    assert ["2", "Title", "0", "1", "0", "0", "not", "measured"] in lines
    assert ["of", "several", "1", "0", "0", "0"] in lines


def test_a_quick_run_shows_what_it_decides_and_counts_what_needs_more(
    capsys: pytest.CaptureFixture[str],
) -> None:
    claims = [
        claim("e1", "holds") | {"id": "e1.norms", "sentence": "Norms are learned."},
        claim("e1", "undecided") | {"id": "e1.kappa", "sentence": "Kappa is not."},
    ]
    figures = [
        figure("e1/rows", "row norms (P abstract)"),
        figure("e1/columns", "column norms (P 4.1)"),
        figure("e2/rows", "row norms, optimizer=sgd (P 4.2)"),
        figure("e2/columns", "column norms, optimizer=sgd (P 4.2)"),
        {"id": "e1/kappa", "matches": False, "agreement": "not measured: no rows"},
    ]
    _laboratory._show_decided({"claims": claims, "figures": figures})
    output = capsys.readouterr().out
    assert "e1.norms" in output and "e1.kappa" not in output and "undecided" not in output
    lines = [line.split() for line in output.splitlines()]
    # the abstract's figures, and the first of an experiment that has none there
    assert ["e1:", "row", "norms", "0.13", "0.1310", "yes"] in lines
    assert "e2: row norms, optimizer=sgd" in output and "column norms" not in output
    assert "4 of 4 printed figures come out as printed; 1 needs the full run." in output
    assert "1 claim is decided; 1 needs the full run: kappascope reproduce" in output
