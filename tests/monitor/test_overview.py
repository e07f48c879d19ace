"""What a record amounts to: how matrices stand, who comes first, and a verdict in sentences."""

import math
from dataclasses import replace
from pathlib import Path

from kappascope.monitor.overview import Standing, extent, gapped, neediest, standings, verdict_of
from kappascope.monitor.record import Alert, Run, Session
from monitored_runs import MATRICES, write_example, written


def told(run: Run) -> str:
    return " ".join(verdict_of(run, standings(run)))


def test_the_verdict_tells_alerts_losses_moves_and_the_loss(tmp_path: Path) -> None:
    run = Run.read(write_example(tmp_path))
    verdict = verdict_of(run, standings(run))
    assert verdict[0].startswith("1 alert, at step 60: h.1.mlp.fc1.weight: 31 %")
    first = "The gradient of h.1.mlp.fc1.weight left its usual size first"
    assert f"{first}: 40 steps before the loss." in verdict
    assert any("10 % of the entries of" in one and "3 of 6" in one for one in verdict)
    assert any("κ from 10.0 to 30.0" in one for one in verdict)
    assert "The logged loss went from 3.00 to 2.00." in verdict
    assert extent(run) == (
        "Step 200; 11 readings of 6 matrices; closed. Readings took 0.8 % of the time."
    )


def test_a_quiet_run_says_so(tmp_path: Path) -> None:
    rows = {"w": {"condition_number": 3.0, "swallowed": 0.001}}
    run = written(tmp_path, {"kind": "reading", "rows": rows})
    assert told(run) == (
        "No alert in 1 reading. Hardly an update was swallowed: 0.1 % of the entries at most."
    )
    assert "no end was written" in extent(run)


def test_an_entry_of_a_short_gain_is_not_what_most_lose(tmp_path: Path) -> None:
    facts = {"gain": {"kind": "vector", "shape": [64]}, "w": {"kind": "up", "shape": [64, 64]}}
    rows = {"gain": {"swallowed": 1 / 64}, "w": {"swallowed": 0.0001}}
    run = written(tmp_path, {"kind": "start", "matrices": facts}, {"kind": "reading", "rows": rows})
    assert "swallowed: 0.01 % of the entries at most, single entries of short gains" in told(run)


def test_several_alerts_are_counted_by_name(tmp_path: Path) -> None:
    one = {"kind": "alert", "matrix": "w", "text": "it moved", "name": "a"}
    run = written(tmp_path, one, one, {**one, "name": "b"})
    assert told(run).startswith("3 alerts (a 2, b 1), the first at step 0: it moved.")


def test_a_cut_and_damage_are_told(tmp_path: Path) -> None:
    write_example(tmp_path, closed=False)
    (segment,) = tmp_path.iterdir()
    segment.write_bytes(segment.read_bytes() + b"torn\n")
    run = written(tmp_path, {"kind": "start", "step": 100, "cut": "it was killed", "resumed": True})
    assert "Taken up again at step 100: it was killed." in told(run)
    run.sessions.append(Session(150, 0.0, {}, "it was killed again"))
    assert "Taken up again 2 times, last at step 150: it was killed again." in told(run)
    assert "1 line of the record did not fit" in told(run)
    assert run.step == 100 and max(step for column in run.columns.values() for step, _ in column)


def test_attention_goes_to_alerts_then_nan_then_swallowed_then_growth() -> None:
    calm = Standing("calm", "up", 0, (2, 2), "float32", first=2.0, kappa=2.0)
    every = [
        calm,
        replace(calm, name="shrunk", kappa=0.5),
        replace(calm, name="swallowed", swallowed=0.4),
        replace(calm, name="hardly swallowed", swallowed=0.001),
        replace(calm, name="nan", kappa=math.nan),
        replace(calm, name="told", alerts=(Alert(0, "a", "told", ""),)),
    ]
    assert [one.name for one in neediest(every)][:4] == ["told", "nan", "swallowed", "shrunk"]


def test_one_entry_of_a_short_gain_is_no_swallowed_update() -> None:
    gain = Standing("gain", "vector", None, (64,), "float32", swallowed=1 / 64)
    matrix = Standing("w", "up", 0, (64, 64), "float32", first=2.0, kappa=3.0, swallowed=0.0)
    assert not gain.loses_updates and replace(gain, swallowed=2 / 64).loses_updates
    assert [one.name for one in neediest([gain, matrix])] == ["w", "gain"]


def test_a_reading_with_entries_that_are_not_finite_is_a_gap(tmp_path: Path) -> None:
    kappas = [{"w": {"condition_number": 2.0}}, {"w": {"non_finite": 3.0}}]
    run = written(
        tmp_path,
        *({"kind": "reading", "step": 10 * k, "rows": rows} for k, rows in enumerate(kappas)),
    )
    (_, before), (step, value) = gapped(run, "w", "condition_number")
    assert before == 2.0 and step == 10 and math.isnan(value)
    (standing,) = standings(run)
    assert math.isnan(standing.kappa or 0.0) and standing.growth == math.inf


def test_parameters_beside_the_matrices_are_vectors(tmp_path: Path) -> None:
    run = written(
        tmp_path,
        {"kind": "start", "matrices": MATRICES},
        {"kind": "reading", "rows": {"ln.weight": {"swallowed": 1.0}}},
    )
    assert [one.name for one in standings(run)] == [*MATRICES, "ln.weight"]
    assert standings(run)[-1].kind == "vector"
