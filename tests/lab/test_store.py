"""Units: rows come back as they were, and a body that holds none is no unit."""

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from kappascope.lab import store
from kappascope.lab.store import parquet_bytes, unit_bytes, unit_of

ROWS = pa.table({"seed": [0, 1], "error": [0.5, float("nan")]})


def test_rows_come_back_as_they_were() -> None:
    header, rows = unit_of(unit_bytes({"seeds": [0, 2]}, ROWS)) or ({}, None)
    assert header == {"seeds": [0, 2]}
    assert parquet_bytes(rows) == parquet_bytes(ROWS)


def test_reading_a_unit_leaves_no_thread_that_could_outlive_the_program(tmp_path: Path) -> None:
    """Such threads of Arrow's ended one program in two with an abort."""
    (tmp_path / "unit").write_bytes(unit_bytes({}, ROWS))
    here = Path(store.__file__).parents[2]
    program = "from kappascope.lab.store import Path, unit_of;"
    program += f"import torch; assert unit_of(Path({str(tmp_path / 'unit')!r}).read_bytes())"
    for _ in range(4):
        ended = subprocess.run([sys.executable, "-c", program], cwd=here, check=False)
        assert ended.returncode == 0


def test_chunks_do_not_show_in_the_bytes() -> None:
    assert parquet_bytes(pa.concat_tables([ROWS[:1], ROWS[1:]])) == parquet_bytes(ROWS)


@pytest.mark.parametrize(
    "body", [None, b"", b"{}", b"[]\nPAR1", b"\xff\n", b"{}\nPAR1PAR1", b"[" * 10**5 + b"\n"]
)
def test_bytes_without_rows_are_no_unit(body: bytes | None) -> None:
    assert unit_of(body) is None
