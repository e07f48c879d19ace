"""Kill a run at many random points, go on with it, and compare its table to the last bit.

Each point is one kill -9: of the driver, of a server, of a worker, of a worker of Ray, or of a
driver whose worker is stopped. Then the same command goes on to the end.

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
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from measuring import environment

from processes import alive, descendants
from tiny_runs import COMMAND, sha

RESULTS = Path(__file__).parent / "results" / "kills.json"
VICTIMS = {
    "local": ("driver", "server", "worker", "driver of a stopped worker"),
    "ray": ("driver", "worker of ray", "worker", "server", "driver of a stopped worker"),
}
LONGEST = {"local": 8.0, "ray": 25.0}  # seconds until a kill: a run takes about as long


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
    """Run, kill after some seconds, and tell which processes are left ten seconds later."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(run(folder, engine), **quiet) as driver:
        time.sleep(after)
        started = descendants(driver.pid)
        found = processes(victim, started)
        target = found[0] if found and not victim.startswith("driver") else driver.pid
        with suppress(ProcessLookupError):
            if "stopped" in victim and found:
                os.kill(found[0], signal.SIGSTOP)
            os.kill(target, signal.SIGKILL)
        code = driver.wait(300)
    deadline = time.monotonic() + 10
    while any(map(alive, started)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return {"victim": victim, "after": after, "code": code, "left": sum(map(alive, started))}


def killed(engine: str, count: int, seed: int) -> dict[str, Any]:
    """Kill at as many points as asked for, and count what came of it."""
    chance, points = random.Random(seed), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as place:
        whole = Path(place) / "whole"  # on this machine, undisturbed
        subprocess.run(run(whole, "local"), capture_output=True, check=True)
        folder = Path(place) / "0"
        for number in range(count):
            if points and points[-1]["code"] == 0:  # it came to its end: begin another
                points[-1]["same"] = sha(folder) == sha(whole)
                folder = Path(place) / str(number)
            victim = VICTIMS[engine][number % len(VICTIMS[engine])]
            points.append(kill(folder, engine, victim, chance.uniform(0, LONGEST[engine])))
        ended = subprocess.run(run(folder, engine), capture_output=True, check=False)
        points[-1]["same"] = ended.returncode == 0 and sha(folder) == sha(whole)
    compared = [point["same"] for point in points if "same" in point]
    return {
        "engine": engine,
        "environment": environment(),
        "points": len(points),
        "tables compared": len(compared),
        "tables of the same bits": sum(map(bool, compared)),
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
