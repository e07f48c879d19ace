"""The record of a run: nothing lost that was written, nothing believed that is damaged."""

import errno
import fcntl
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from kappascope import Refusal
from kappascope.monitor.record import Recorder, Row, Run, is_run, sole_writer, table_of
from monitored_runs import MATRICES, write_example


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = Run.read(write_example(tmp_path))
    assert run.matrices == MATRICES and run.model == "GPT" and run.step == 200 and run.is_closed
    assert run.series("h.0.mlp.fc1.weight", "condition_number")[:2] == [(0, 10.0), (20, 12.0)]
    assert run.series("h.0.mlp.fc1.weight", "signal", 1.0)[1] == (20, 1e-5)
    assert run.logs["loss"][-1] == (200, 2.0) and run.alerts[0].name == "swallowed"
    assert run.damaged == 0 and len(run.rings) == 1


def test_numbers_that_are_not_finite_come_back(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    rows = {"w": {"a": math.inf, "b": [[0.0, -math.inf], [1.0, math.nan]]}}
    recorder.write({"kind": "reading", "step": 1, "rows": rows})
    values = [row.value for row in Run.read(tmp_path).rows]
    assert values[:2] == [math.inf, -math.inf] and math.isnan(values[2])


def test_every_cut_of_a_record_leaves_the_entries_before_it(tmp_path: Path) -> None:
    write_example(tmp_path / "whole", steps=40)
    (segment,) = (tmp_path / "whole").iterdir()
    data = segment.read_bytes()
    ends = [i for i, byte in enumerate(data) if byte == ord("\n")]
    for cut in range(0, len(data), 97):
        folder = tmp_path / str(cut)
        folder.mkdir()
        (folder / segment.name).write_bytes(data[:cut])
        run = Run(folder)
        assert run.refresh() == sum(end < cut for end in ends)


def test_a_flipped_bit_costs_one_entry_and_is_counted(tmp_path: Path) -> None:
    whole = len(Run.read(write_example(tmp_path, steps=40)).logs["loss"])
    (segment,) = tmp_path.iterdir()
    data = bytearray(segment.read_bytes())
    place = data.rindex(b'"loss"') + 2
    data[place] ^= 1
    segment.write_bytes(data)
    run = Run.read(tmp_path)
    assert run.damaged == 1 and len(run.logs["loss"]) == whole - 1


def test_a_killed_process_loses_nothing_it_had_written(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from kappascope.monitor.record import Recorder\n"
        "recorder = Recorder(Path(sys.argv[1]))\n"
        "for step in range(100):\n"
        "    recorder.write({'kind': 'log', 'step': step, 'values': {'loss': step}})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    run = Run.read(tmp_path)
    assert len(run.logs["loss"]) == 100 and not run.is_closed and run.damaged == 0


def test_a_folder_has_one_writer_at_a_time(tmp_path: Path) -> None:
    first = sole_writer(tmp_path / "run")
    assert first is not None
    (tmp_path / "link").symlink_to("run")
    for spelling in ("run", "link", "run/../run"):
        with pytest.raises(Refusal, match=r"another monitor of this process .* \(close that one"):
            sole_writer(tmp_path / spelling)
    first.close()
    assert (tmp_path / "run" / "lock").read_bytes() == b""
    again = sole_writer(tmp_path / "run")
    assert again is not None
    again.close()


def test_a_killed_process_keeps_nobody_out_and_neither_does_a_child_that_outlives_it(
    tmp_path: Path,
) -> None:
    code = (
        "import os, signal, sys, time; from pathlib import Path\n"
        "from kappascope.monitor.record import sole_writer\n"
        "claim = sole_writer(Path(sys.argv[1]))\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    print(os.getpid(), flush=True)\n"
        "    time.sleep(600)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            with pytest.raises(Refusal, match=f"process {process.pid} on"):
                sole_writer(tmp_path)
            process.kill()
            process.wait()
            os.kill(child, 0)  # it lives
            again = sole_writer(tmp_path)
            assert again is not None
            again.close()
        finally:
            process.kill()
            os.kill(child, signal.SIGKILL)


def test_a_folder_that_cannot_be_written_has_nothing_to_claim(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert sole_writer(tmp_path / "file" / "run") is None


def test_where_a_file_system_has_no_locks_a_name_keeps_others_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", without)
    first = sole_writer(tmp_path)
    assert first is not None
    with pytest.raises(Refusal, match=r"another monitor .* remove the file lock if it has ended"):
        sole_writer(tmp_path)
    first.close()
    again = sole_writer(tmp_path)
    assert again is not None
    del again  # of a monitor that was never closed and is gone
    here = socket.gethostname()
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    for name, keeps_out in [
        ("process 1 on elsewhere", True),
        (f"process {os.getppid()} on {here}", True),
        (f"process {ended.pid} on {here}", False),
        ("", False),
    ]:
        (tmp_path / "lock").write_text(name)
        if keeps_out:
            with pytest.raises(Refusal, match=f"{name} records a run there"):
                sole_writer(tmp_path)
        else:
            claim = sole_writer(tmp_path)
            assert claim is not None
            claim.close()


def test_of_two_that_begin_at_once_without_locks_the_one_whose_name_stays_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    def other_comes(_: float) -> None:
        (tmp_path / "lock").write_text("process 7 on elsewhere")

    monkeypatch.setattr(fcntl, "flock", without)
    monkeypatch.setattr("kappascope.monitor.record.time.sleep", other_comes)
    with pytest.raises(Refusal, match="process 7 on elsewhere records a run there"):
        sole_writer(tmp_path)
    assert (tmp_path / "lock").read_text() == "process 7 on elsewhere"


def test_a_child_that_was_forked_has_no_part_in_the_record(tmp_path: Path) -> None:
    claim = sole_writer(tmp_path)
    recorder = Recorder(tmp_path, claim)
    recorder.write({"kind": "start", "step": 0})
    if (child := os.fork()) == 0:
        refused = False
        try:
            recorder.write({"kind": "end", "step": 9})
        except Refusal:
            refused = True
        recorder.release()
        os._exit(0 if refused else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert (tmp_path / "lock").read_bytes()
    with pytest.raises(Refusal, match="another monitor of this process"):
        sole_writer(tmp_path)
    recorder.write({"kind": "log", "step": 1, "values": {"loss": 1.0}})
    recorder.release()
    run = Run.read(tmp_path)
    assert run.step == 1 and not run.is_closed


def test_a_lock_that_was_removed_is_made_anew_unless_another_has_come(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, sole_writer(tmp_path))
    recorder.write({"kind": "start", "step": 0})
    (tmp_path / "lock").unlink()
    recorder.write({"kind": "log", "step": 1, "values": {"loss": 1.0}})
    with pytest.raises(Refusal, match="another monitor of this process"):
        sole_writer(tmp_path)
    (tmp_path / "lock").unlink()
    other = Recorder(tmp_path, sole_writer(tmp_path))
    other.write({"kind": "start", "step": 0})
    other.write({"kind": "log", "step": 1, "values": {"loss": 2.0}})
    for is_over in (False, True):
        if is_over:
            other.release()
        with pytest.raises(Refusal, match="another monitor has come"):
            recorder.write({"kind": "log", "step": 2, "values": {"loss": 1.0}})
    recorder.release()
    assert Run.read(tmp_path).logs == {"loss": [(1, 2.0)]}


def test_a_run_whose_folder_is_moved_does_not_go_on_in_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kappascope.monitor.record.SEGMENT_BYTES", 100)
    recorder = Recorder(tmp_path / "run", sole_writer(tmp_path / "run"))
    recorder.write({"kind": "log", "step": 1, "values": {"loss": 1.0}})
    (tmp_path / "run").rename(tmp_path / "moved")
    recorder.write({"kind": "log", "step": 2, "values": {"loss": 1.0}})
    other = Recorder(tmp_path / "run", sole_writer(tmp_path / "run"))
    with pytest.raises(Refusal, match="its record was removed or moved"):
        recorder.write({"kind": "log", "step": 3, "values": {"loss": 1.0}})
    other.release()
    assert Run.read(tmp_path / "moved").step == 2 and Run.read(tmp_path / "run").step == 0


def test_a_run_is_followed_while_it_is_written(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    run = Run(tmp_path)
    for step in range(3):
        recorder.write({"kind": "log", "step": step, "values": {"loss": 1.0}})
        assert run.refresh() == 1 and run.step == step
    assert run.refresh() == 0


def test_a_session_supersedes_what_was_recorded_after_its_first_step(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    for step in (0, 10, 20):
        recorder.write({"kind": "reading", "step": step, "rows": {"w": {"sigma_max": step}}})
    recorder.close()
    again = Recorder(tmp_path)
    again.write({"kind": "start", "step": 10, "time": 0.0, "cut": "at step 20"})
    for step in (10, 20):
        again.write({"kind": "reading", "step": step, "rows": {"w": {"sigma_max": step + 0.5}}})
    assert Run.read(tmp_path).series("w", "sigma_max") == [(0, 0.0), (10, 10.0), (20, 20.5)]


def test_what_broke_one_session_is_no_news_about_the_next(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.write({"kind": "ring", "step": 20, "steps": [20], "norms": {}, "text": "loss is NaN"})
    assert Run.read(tmp_path).rings
    recorder.write({"kind": "start", "step": 10, "time": 0.0, "cut": "at step 20"})
    assert not Run.read(tmp_path).rings


def test_a_segment_that_has_grown_is_followed_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kappascope.monitor.record.SEGMENT_BYTES", 100)
    recorder = Recorder(tmp_path)
    for step in range(10):
        recorder.write({"kind": "log", "step": step, "values": {"loss": 1.0}})
    assert len(list(tmp_path.iterdir())) > 2
    assert [step for step, _ in Run.read(tmp_path).logs["loss"]] == list(range(10))


def test_a_write_that_fails_is_an_error_and_the_next_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path)
    write = os.write

    def torn(file: int, data: bytes) -> int:
        write(file, data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", torn)
    with pytest.raises(OSError, match="No space"):
        recorder.write({"kind": "log", "step": 1, "values": {"loss": 1.0}})
    monkeypatch.undo()
    recorder.write({"kind": "log", "step": 2, "values": {"loss": 1.0}})
    run = Run.read(tmp_path)
    assert run.logs["loss"] == [(2, 1.0)] and run.damaged == 1


def test_a_record_that_was_removed_is_an_error_and_not_written_into_nothing(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run")
    recorder.write({"kind": "start", "step": 0})
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(OSError, match="No such file"):
        recorder.write({"kind": "log", "step": 1, "values": {"loss": 1.0}})
    (tmp_path / "run").mkdir()
    recorder.write({"kind": "log", "step": 2, "values": {"loss": 1.0}})
    recorder.close()
    assert Run.read(tmp_path / "run").logs == {"loss": [(2, 1.0)]}


def test_a_folder_without_a_record_is_refused(tmp_path: Path) -> None:
    assert not is_run(tmp_path)
    with pytest.raises(Refusal, match="holds no record of a run"):
        Run.read(tmp_path)


def test_a_table_needs_no_pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Row(0, "w", "sigma_max", 2.0)]
    assert table_of(rows).column_names == ["step", "matrix", "quantity", "value", "index"]
    assert table_of([]).num_rows == 0
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert table_of(rows) == [asdict(rows[0])]
    assert table_of(rows).to_pylist() == [asdict(rows[0])]  # as the tutorial reads them
