"""Steps are found in folders and put into the order of their numbers."""

from pathlib import Path

import torch

from kappascope.clinic.diagnose import diagnose
from kappascope.clinic.trajectories import (
    in_step_order,
    matrix_trajectories,
    steps,
    trajectory_lines,
)


def test_numbers_are_ordered_as_numbers() -> None:
    given = ["step100.pt", "step20.pt", "step3.pt"]
    assert in_step_order(given) == ["step3.pt", "step20.pt", "step100.pt"]


def test_paths_that_differ_in_more_than_numbers_stay_as_given() -> None:
    assert in_step_order(["b2.pt", "a1.pt"]) == ["b2.pt", "a1.pt"]


def test_a_folder_of_files_is_a_trajectory(tmp_path: Path) -> None:
    for step in (100, 20):
        torch.save({"w": torch.eye(2)}, tmp_path / f"step{step}.pt")
    (tmp_path / "log.txt").write_text("")
    assert steps([str(tmp_path)]) == [str(tmp_path / f"step{step}.pt") for step in (20, 100)]


def test_a_folder_of_folders_is_a_trajectory(tmp_path: Path) -> None:
    for step in (1000, 500):
        inner = tmp_path / f"checkpoint-{step}"
        inner.mkdir()
        torch.save({"w": torch.eye(2)}, inner / "pytorch_model.bin")
    assert [Path(step).name for step in steps([str(tmp_path)])] == [
        "checkpoint-500",
        "checkpoint-1000",
    ]


def test_a_checkpoint_in_a_folder_is_one_step(tmp_path: Path) -> None:
    torch.save({"w": torch.eye(2)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "runs1").mkdir()
    assert steps([str(tmp_path)]) == [str(tmp_path)]


def test_shards_are_no_steps(tmp_path: Path) -> None:
    for shard in (1, 2):
        torch.save({f"w{shard}": torch.eye(2)}, tmp_path / f"part-0000{shard}-of-00002.bin")
    assert steps([str(tmp_path)]) == [str(tmp_path)]


def test_each_matrix_has_a_line_and_what_moved_most_is_first() -> None:
    first = {"a.weight": torch.eye(4), "b.weight": torch.eye(4)}
    second = {"a.weight": torch.eye(4) * 1.1, "b.weight": torch.eye(4) * 2}
    found = [diagnose(first), diagnose(second, reference=first)]
    rows = matrix_trajectories(found)
    assert [row.name for row in rows] == ["b.weight", "a.weight"]
    assert rows[0].moves[0] is None
    assert round(rows[0].moved, 6) == 1.0
    lines = list(trajectory_lines(found))
    assert lines[1].startswith("    █  b  1.0; κ 1.00 → 1.00")
