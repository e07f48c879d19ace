"""Kill a run at many random points, go on with it, and compare its table to the last bit.

Each point is one kill -9: of the driver, of a server, of a worker, of a worker of Ray, or of a
driver whose worker is stopped, at any moment of the time that an undisturbed run takes. Where there
is no such process yet, the driver is killed. Then the same command goes on to the end.

    python benchmarks/kills.py --points 50 --engine local
    python benchmarks/kills.py --points 50 --engine ray
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import pyarrow.parquet
from measuring import environment

from processes import alive, descendants
from tiny_runs import COMMAND, sha

RESULTS = Path(__file__).parent / "results" / "kills.json"
VICTIMS = {
    "local": ("driver", "server", "worker", "driver of a stopped worker"),
    "ray": ("driver", "worker of ray", "worker", "server", "driver of a stopped worker"),
}


def run(folder: Path, engine: str) -> list[str]:
    """The command, on two processes."""
    return [*COMMAND, "reproduce", "2", "--jobs", "2", "--engine", engine, "--out", str(folder)]


def processes(kind: str, started: set[int]) -> list[int]:
    """The processes of a kind among those that a driver started."""
    commands: dict[int, bytes] = {}
    for pid in started:
        with suppress(OSError):
            commands[pid] = Path(f"/proc/{pid}/cmdline").read_bytes()
    if kind == "worker of ray":
        titles = (b"ray::kappascope", b"ray::IDLE")  # not its agents, without which a node is lost
        return [pid for pid, command in commands.items() if command.startswith(titles)]
    servers = {pid for pid, command in commands.items() if b"kappascope.system._server" in command}
    forked = {pid for pid in servers if descendants(pid) and parent(pid) in servers}
    return sorted(forked if "worker" in kind else servers - forked)


def parent(pid: int) -> int:
    """The number of the process that started one."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def kill(folder: Path, engine: str, victim: str, after: float) -> dict[str, Any]:
    """Run, kill after some seconds, and tell which processes are left ten seconds later.

    There is no victim where the run ends before.
    """
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(run(folder, engine), **quiet) as driver:
        with suppress(subprocess.TimeoutExpired):
            driver.wait(after)
            return {"victim": "", "after": after, "code": driver.returncode, "left": 0}
        started = descendants(driver.pid)
        found = processes(victim, started)
        victim = victim if found else "driver"
        with suppress(ProcessLookupError):
            if "stopped" in victim:
                os.kill(found[0], signal.SIGSTOP)
            os.kill(driver.pid if victim.startswith("driver") else found[0], signal.SIGKILL)
        code = driver.wait(300)
    deadline = time.monotonic() + 10
    while any(map(alive, started)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return {"victim": victim, "after": after, "code": code, "left": sum(map(alive, started))}


def rows(folder: Path) -> Counter[str]:
    """How often each row of a table is there."""
    return Counter(map(str, pyarrow.parquet.read_table(folder / "trials.parquet").to_pylist()))


def compared(folder: Path, whole: Path) -> dict[str, Any]:
    """What a table has lost and what it has too often, beside that of an undisturbed run."""
    found, expected = rows(folder), rows(whole)
    lost, doubled = (expected - found).total(), (found - expected).total()
    return {"same": sha(folder) == sha(whole), "lost": lost, "doubled": doubled}


def killed(engine: str, count: int, seed: int) -> dict[str, Any]:
    """Kill at as many points as asked for, and count what came of it."""
    chance, points, tables = random.Random(seed), list[dict[str, Any]](), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as place:
        whole, alone = Path(place) / "whole", Path(place) / "alone"
        subprocess.run(run(whole, "local"), capture_output=True, check=True)
        began = time.monotonic()
        subprocess.run(run(alone, engine), capture_output=True, check=True)
        longest = time.monotonic() - began
        tables.append(compared(alone, whole))
        folder = Path(place) / "0"
        while len(points) < count:
            victim = VICTIMS[engine][len(points) % len(VICTIMS[engine])]
            fresh, began = not folder.exists(), time.monotonic()
            point = kill(folder, engine, victim, chance.uniform(0, longest))
            print(len(points), point, file=sys.stderr, flush=True)
            if point["victim"]:
                points.append(point)
            elif fresh:  # nothing was killed: others left this machine, or came, since it was timed
                longest = time.monotonic() - began
            if point["code"] == 0:  # it came to its end: begin another
                tables.append(compared(folder, whole))
                folder = Path(place) / str(len(tables))
        subprocess.run(run(folder, engine), capture_output=True, check=True)
        tables.append(compared(folder, whole))
    return {
        "engine": engine,
        "environment": environment(),
        "points": len(points),
        "killed": dict(Counter(point["victim"] for point in points)),
        "seconds of a run": round(longest, 1),
        "tables compared": len(tables),
        "tables of the same bits": sum(table["same"] for table in tables),
        "rows lost": sum(table["lost"] for table in tables),
        "rows doubled": sum(table["doubled"] for table in tables),
        "processes left": sum(point["left"] for point in points),
    }


def main() -> None:
    """Kill, print what came of it, and keep it beside the figures of the other engine."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--points", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=tuple(VICTIMS), default="local")
    asked = parser.parse_args()
    figures = killed(asked.engine, asked.points, asked.seed)
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    others = [each for each in before.get("results", []) if each["engine"] != asked.engine]
    report = {"what": __doc__.partition("\n")[0], "results": [*others, figures]}
    RESULTS.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
