"""Kill a run at many random points, go on with it, and compare its table to the last bit.

Each point is one kill -9: of the driver, of its server, of a worker, or of a driver whose worker is
stopped. Then the same command goes on to the end.

    python benchmarks/kills.py --points 50
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

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from measuring import environment

from processes import alive, descendants
from tiny_runs import COMMAND, sha

RESULTS = Path(__file__).parent / "results" / "kills.json"
VICTIMS = ("driver", "server", "worker", "driver of a stopped worker")
LONGEST = 8.0  # seconds until a kill: a run takes about as long, loading included


def run(folder: Path) -> list[str]:
    """The command, on two processes."""
    return [*COMMAND, "reproduce", "2", "--jobs", "2", "--out", str(folder)]


def kill(folder: Path, victim: str, after: float) -> dict[str, object]:
    """Run, kill after some seconds, and tell which processes are left ten seconds later."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(run(folder), **quiet) as driver:
        time.sleep(after)
        started = descendants(driver.pid)
        server, *workers = [*sorted(started - {driver.pid}), *[driver.pid] * 3][:3]
        target = {"server": server, "worker": workers[0]}.get(victim, driver.pid)
        with suppress(ProcessLookupError):
            if "stopped" in victim and workers[0] != driver.pid:
                os.kill(workers[0], signal.SIGSTOP)
            os.kill(target, signal.SIGKILL)
        code = driver.wait(120)
    deadline = time.monotonic() + 10
    while any(map(alive, started)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return {"victim": victim, "after": after, "code": code, "left": sum(map(alive, started))}


def main() -> None:
    """Kill at as many points as asked for, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--points", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    chance, points = random.Random(asked.seed), []
    with tempfile.TemporaryDirectory() as place:
        whole = Path(place) / "whole"
        subprocess.run(run(whole), capture_output=True, check=True)
        folder = Path(place) / "0"
        for number in range(asked.points):
            if (folder / "trials.parquet").exists():  # it came to its end: begin another
                points[-1]["same"] = sha(folder) == sha(whole)
                folder = Path(place) / str(number)
            victim = VICTIMS[number % len(VICTIMS)]
            points.append(kill(folder, victim, chance.uniform(0, LONGEST)))
        ended = subprocess.run(run(folder), capture_output=True, check=False)
        points[-1]["same"] = ended.returncode == 0 and sha(folder) == sha(whole)
    compared = [point["same"] for point in points if "same" in point]
    figures = {
        "what": __doc__.partition("\n")[0],
        "environment": environment(),
        "points": len(points),
        "tables compared": len(compared),
        "tables of the same bits": sum(map(bool, compared)),
        "processes left": sum(int(str(point["left"])) for point in points),
    }
    text = json.dumps(figures, indent=1)
    RESULTS.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
