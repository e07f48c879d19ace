"""Zip archives: where members lie; what harms is refused (more in the tests of torch's files)."""

import zipfile
from pathlib import Path

import pytest

from kappascope.checkpoints.formats import Malformed
from kappascope.checkpoints.locations import CheckpointFile
from kappascope.checkpoints.zips import archive_members


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_members_are_read_where_they_lie(tmp_path: Path, method: int) -> None:
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("a", b"abc" * 100)
        archive.writestr("b/c", b"d")
    members = archive_members(CheckpointFile.at(path).whole)
    assert {name: member.read() for name, member in members.items()} == {
        "a": b"abc" * 100,
        "b/c": b"d",
    }
    assert members["a"].first(5) == b"abcab"
    assert members["b/c"].first(5) == b"d"


def test_a_member_outside_the_folder_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../a", b"abc")
    with pytest.raises(Malformed, match="a member at"):
        archive_members(CheckpointFile.at(path).whole)
