"""A study goes on where it was stopped, and its rows are the same to the last bit."""

import os
import random
import shutil
import signal
import time
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from failing_disk import Faults
from kappascope.lab import runs
from kappascope.lab.experiment import Experiment, grid
from kappascope.lab.store import unit_bytes, unit_of
from kappascope.refusal import Refusal
from kappascope.system import files
from kappascope.system.store import Store
from kappascope.system.workers import Here, Processes
from tiny_experiments import BAD, SLOW, TOY, trials
from tiny_runs import complete, sha


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy, run at once in this process."""
    folder = tmp_path_factory.mktemp("whole")
    complete(TOY, folder)
    return folder


def units(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (folder / "units").iterdir()}


def test_the_table_is_tidy(whole: Path) -> None:
    table = pq.read_table(whole / "trials.parquet")
    last = ["stream", "seed", "component", "error", "value", "target"]
    assert table.column_names == ["experiment", "size", "pause", "epoch", *last]
    assert table.num_rows == 2 * 2 * (5 + 130)
    first = table.slice(0, 2).to_pylist()
    assert [row["epoch"] for row in first] == [1, 2]
    assert {(r["experiment"], r["stream"], r["seed"]) for r in first} == {("e1", "paper", 0)}
    assert b"torch" in table.schema.metadata[b"kappascope"]


def test_spectra_of_three_trials_on_the_papers_streams_are_kept(whole: Path) -> None:
    table = pq.read_table(whole / "spectra.parquet")
    assert table.column_names[-4:] == ["stream", "seed", "which", "values"]
    assert table["seed"].to_pylist() == [0, 1, 2] * 2
    assert set(table["stream"].to_pylist()) == {"paper"}
    assert [len(values) for values in table["values"].to_pylist()] == [2] * 3 + [4] * 3


def test_an_experiment_without_the_papers_streams_keeps_spectra_of_its_own(tmp_path: Path) -> None:
    results = complete(replace(TOY, paper=0, own=9), tmp_path)
    assert set(results.spectra.rows["stream"].to_pylist()) == {"own"}


def test_two_processes_give_the_bytes_of_one(whole: Path, tmp_path: Path) -> None:
    complete(TOY, tmp_path, Processes(2))
    assert sha(tmp_path) == sha(whole)


def test_the_same_again_runs_nothing_and_gives_the_same_bytes(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    before = units(tmp_path)
    complete(TOY, tmp_path)
    assert units(tmp_path) == before
    assert sha(tmp_path) == sha(whole)


def test_more_trials_later_run_only_the_new_ones_and_give_the_same_bytes(
    whole: Path, tmp_path: Path
) -> None:
    complete(replace(TOY, own=70), tmp_path)
    before = units(tmp_path)
    complete(TOY, tmp_path)
    after = units(tmp_path)
    assert before.items() <= after.items()
    own = sorted(name[-18:] for name in after if "own" in name)
    assert own == sorted(2 * ["000000-000064.unit", "000064-000070.unit", "000070-000128.unit",
                              "000128-000130.unit"])  # fmt: skip
    assert sha(tmp_path) == sha(whole)


def test_fewer_trials_later_run_nothing(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "again")
    complete(replace(TOY, own=70), tmp_path / "direct")
    complete(replace(TOY, own=70), tmp_path / "again")
    assert sha(tmp_path / "again") == sha(tmp_path / "direct")
    assert units(tmp_path / "again").keys() == units(whole).keys()


@pytest.mark.parametrize("damage", ["cut", "empty", "garbage", "gone"])
def test_damaged_units_are_run_again(damage: str, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    victims = random.sample(sorted((tmp_path / "units").iterdir()), 3)
    for victim in victims:
        data = {"cut": victim.read_bytes()[:-1], "empty": b"", "garbage": b"\x00" * 500}
        victim.unlink() if damage == "gone" else victim.write_bytes(data[damage])
    (tmp_path / "units" / "notes.txt").write_text("of a stranger")
    (tmp_path / "units" / "e1-own-0123456789abcdef-000000-000064.unit").write_text("another's")
    (tmp_path / "units" / ".e1.unit.99.tmp").write_text("left over")
    plan = runs.plan_runs([TOY])
    assert {b.name for b in runs.survey(plan, Store(tmp_path))[0]} == {v.name for v in victims}
    complete(TOY, tmp_path)
    assert sha(tmp_path) == sha(whole)


def test_a_unit_that_was_run_twice_counts_once(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    plan, kept = runs.plan_runs([TOY]), Store(tmp_path)
    own = next(block for block in plan.blocks if block.stream == "own")
    again = replace(own, seeds=range(30, 90))
    kept.put(again.name, runs.work(kept.resume_points, again))
    complete(TOY, tmp_path)
    assert sha(tmp_path) == sha(whole)


def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(whole: Path, tmp_path: Path) -> None:
    """Each attempt is a copy of this process, killed without warning."""
    chance, finished = random.Random(0), False
    for _ in range(40):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer Pythons warn of threads, which we do not use
            attempt = os.fork()
        if attempt == 0:
            complete(TOY, tmp_path)
            os._exit(0)
        deadline = time.monotonic() + chance.uniform(0.0, 0.1)
        while time.monotonic() < deadline and not finished:
            finished = os.waitpid(attempt, os.WNOHANG)[0] != 0
            time.sleep(0.001)
        if finished:
            break
        os.kill(attempt, signal.SIGKILL)
        os.waitpid(attempt, 0)
    complete(TOY, tmp_path)
    assert sha(tmp_path) == sha(whole)


def test_a_full_disk_at_any_call_loses_nothing_that_was_done(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = replace(TOY, own=3)
    complete(small, tmp_path / "direct")
    for number in range(2, 200, 3):
        folder = tmp_path / str(number)
        with monkeypatch.context() as patch:
            faults = Faults(patch, number)
            try:
                complete(small, folder)
            except (Refusal, OSError) as error:
                assert isinstance(error, Refusal), "every fault is told as a refusal"
                assert error.code == 5
        if faults.left > 0:
            break
        for name in ("trials.parquet", "spectra.parquet"):
            if (folder / name).exists():
                pq.read_table(folder / name)
        kept = units(folder) if (folder / "units").exists() else {}
        complete(small, folder)
        assert kept.items() <= units(folder).items()
        assert sha(folder) == sha(tmp_path / "direct")
    assert faults.left > 0, "the last round met no fault: every call had its turn"


def test_a_folder_that_vanishes_ends_the_run(tmp_path: Path) -> None:
    plan, kept = runs.plan_runs([TOY]), Store(tmp_path / "folder")
    with pytest.raises(Refusal) as refused, kept.lock():
        for _ in runs.run(runs.survey(plan, kept)[0], kept, Here()):
            shutil.rmtree(tmp_path / "folder")
    assert refused.value.code == 5


def test_a_unit_that_cannot_be_read_back_is_told(tmp_path: Path) -> None:
    complete(TOY, tmp_path)
    victim = next((tmp_path / "units").iterdir())
    victim.write_bytes(b"")
    (failed,) = runs.gather(runs.plan_runs([TOY]), Store(tmp_path)).provenance["failed"]
    assert failed["reason"] == "cannot be read back"


def test_code_that_changes_while_trials_run_ends_the_run(tmp_path: Path) -> None:
    kept = Store(tmp_path)
    stale = [replace(block, code="of yesterday") for block in runs.plan_runs([TOY]).blocks]
    with kept.lock(), pytest.raises(Refusal, match="changed while") as refused:
        list(runs.run(stale, kept, Here()))
    assert refused.value.code == 4 and not units(tmp_path)


def test_misfortunes_of_trials_are_told_and_leave_the_rest(tmp_path: Path) -> None:
    results = complete(BAD, tmp_path, Processes(2, retries=0))
    failed = {f["trials"].split("=")[1].split(" own")[0] for f in results.provenance["failed"]}
    assert failed == {"raises", "killed", "memory", "exits", "wrong shape"}
    rows = results.rows
    assert len(rows.where(kind="fine")) == 2
    assert np.isnan(rows.where(kind="nan", component="row_norms").values()).all()
    assert results.provenance["trials"] == 14


def test_a_column_is_one_value_for_all_or_one_for_each() -> None:
    block = runs.plan_runs([replace(TOY, own=0)]).blocks[0]
    five = torch.arange(5.0, requires_grad=True)
    columns = {"error": five, "epoch": torch.tensor(3), "layer": [4, 3, 2, 1, 0], "value": None}
    rows = runs.tabulate([{**columns, "component": "row_norms"}], block).to_pylist()
    assert [row["error"] for row in rows] == [row["seed"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["layer"] for row in rows] == [4, 3, 2, 1, 0]
    assert {(row["epoch"], row["value"], row["size"]) for row in rows} == {(3, None, 2)}
    with pytest.raises(ValueError, match="3 values for 5 trials"):
        runs.tabulate([{"error": five[:3]}], block)


def test_a_setting_given_twice_is_run_once_and_told() -> None:
    plan = runs.plan_runs([replace(TOY, grid=(*TOY.grid, TOY.grid[0]))])
    assert len(plan.blocks) == 4
    assert all("twice" in note for note in plan.notes) and len(plan.notes) == 2


def test_no_trials_are_refused() -> None:
    with pytest.raises(Refusal) as refused:
        runs.plan_runs([replace(TOY, paper=0, own=0)])
    assert refused.value.code == 4


def test_trials_asked_for_are_capped_where_they_are_dear_and_that_is_told() -> None:
    dear = replace(TOY, grid=grid(size=(128, 256)), own={128: 50, 256: 7})
    plan = runs.plan_runs([dear], asked=1000)
    own = {b.setting["size"]: len(b.seeds) for b in plan.blocks if b.stream == "own"}
    assert own == {128: 1000, 256: 7}
    assert len(plan.notes) == 1 and "size=256" in plan.notes[0]


def test_a_hundred_thousand_settings_are_planned(tmp_path: Path) -> None:
    many = Experiment(1, "Many", "", "", grid(size=(2,), step=range(100_000)), trials, own=1)
    plan, kept = runs.plan_runs([many]), Store(tmp_path)
    with kept.lock():
        assert len(runs.survey(plan, kept)[0]) == 100_000


def test_ten_thousand_trials_have_ten_thousand_streams() -> None:
    many = Experiment(1, "Many", "", "", grid(size=(2,), step=range(100)), trials, own=100)
    states = [
        source.get_state().numpy().tobytes()
        for block in runs.plan_runs([many]).blocks
        for source in block.streams.random().sources  # type: ignore[attr-defined]
    ]
    assert len(set(states)) == len(states) == 10_000


def test_the_longest_work_is_first() -> None:
    plan = runs.plan_runs([replace(TOY, grid=grid(size=(2, 512, 64))), replace(SLOW, effort=99.0)])
    costs = [b.cost for b in runs.survey(plan, _Empty(Path()))[0]]
    assert costs == sorted(costs, reverse=True)


class _Empty(Store):
    def names(self) -> list[str]:
        return []


def test_kept_trials_run_again_alone_are_the_same(whole: Path) -> None:
    checked = list(runs.verify([TOY], Store(whole), 5))
    assert len(checked) == 5
    assert all(same for _, same in checked)
    assert all(len(block.seeds) == 1 for block, _ in checked)


def test_trials_of_older_code_do_not_hide_those_of_this(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    kept = Store(tmp_path)
    for name in kept.names()[1:]:
        header, rows = unit_of(kept.take(name)) or ({}, None)
        kept.put(name, unit_bytes(header | {"code": "older"}, rows))
    assert len(list(runs.verify([TOY], kept, 1))) == 1


def test_kept_rows_that_are_not_what_the_trials_give_are_found(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    kept = Store(tmp_path)
    for name in kept.names():
        header, rows = unit_of(kept.take(name)) or ({}, None)
        place = rows.column_names.index("error")
        changed = rows.set_column(place, "error", rows["value"])
        kept.put(name, unit_bytes(header, changed))
    assert not any(same for _, same in runs.verify([TOY], kept, 3))


def _without_seeds(header: dict, rows: pa.Table) -> tuple[dict, pa.Table]:
    return {name: header[name] for name in header if name != "seeds"}, rows


def _of_text(header: dict, rows: pa.Table) -> tuple[dict, pa.Table]:
    place = rows.column_names.index("error")
    return header, rows.set_column(place, "error", pa.array(["much"] * rows.num_rows))


def _of_another(header: dict, rows: pa.Table) -> tuple[dict, pa.Table]:
    return {**header, "group": "e9-own-0123456789abcdef"}, rows


def _of_other_seeds(header: dict, rows: pa.Table) -> tuple[dict, pa.Table]:
    seeds = rows["seed"].to_numpy() + 1000
    return header, rows.set_column(rows.column_names.index("seed"), "seed", pa.array(seeds))


def _of_no_columns(header: dict, rows: pa.Table) -> tuple[dict, pa.Table]:
    return header, pa.table({"x": [1]})


@pytest.mark.parametrize(
    "change", [_without_seeds, _of_text, _of_another, _of_other_seeds, _of_no_columns]
)
def test_sealed_units_with_wrong_content_are_run_again(change, whole: Path, tmp_path: Path) -> None:
    store, plan = Store(shutil.copytree(whole, tmp_path / "out")), runs.plan_runs([TOY])
    name = store.names()[0]
    store.put(name, unit_bytes(*change(*(unit_of(store.take(name)) or ({}, None)))))
    blocks, damaged = runs.survey(plan, store)
    assert damaged == [name] and [block.name for block in blocks] == [name]
    assert len(list(runs.verify([TOY], store, 3))) == 3
    complete(TOY, store.folder)
    assert sha(store.folder) == sha(whole)


def test_other_instructions_of_the_processor_are_another_study(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(shutil.copytree(whole, tmp_path / "out"))
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    files.environment.cache_clear()
    try:
        with pytest.raises(Refusal, match=r"cpu modes was .* and is MKL_CBWR=COMP") as refusal:
            store.begin(runs.plan_runs([TOY]).study)
    finally:
        files.environment.cache_clear()
    assert refusal.value.code == 4
