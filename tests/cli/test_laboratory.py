"""The tables that the commands of the laboratory end with."""

from types import SimpleNamespace
from typing import Any

import pytest

from kappascope.cli import _laboratory


def claim(experiment: str, verdict: str) -> dict[str, Any]:
    return {"experiment": experiment, "verdict": verdict}


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
    lines = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
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
        {"id": "e1/rows", "printed": "0.13", "measured": 0.131, "matches": True},
        {"id": "e1/kappa", "matches": False, "agreement": "not measured: no rows"},
    ]
    _laboratory._show_decided({"claims": claims, "figures": figures})
    output = capsys.readouterr().out
    assert "e1.norms" in output and "e1.kappa" not in output and "undecided" not in output
    assert ["e1/rows", "0.13", "0.131", "yes"] in [line.split() for line in output.splitlines()]
    assert "1 of 1 printed figures" in output and "1 need the full run." in output
    assert "1 claim is decided; 1 needs the full run: kappascope reproduce" in output
