"""How soon the command refuses what it cannot use, over the time that ``import torch`` takes.

``python benchmarks/startup.py`` runs each refusal and the import in turn, ROUNDS times, each in a
process of its own, and writes the medians of their ratios to ``results/startup.json``.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kappascope.system.files import environment

RESULTS = Path(__file__).parent / "results" / "startup.json"
ROUNDS = 9
LIMIT = 0.3  # of the time that torch takes to load


def seconds(arguments: list[str], folder: str) -> float:
    """The wall time of a Python process with these arguments."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, check=False)
    return time.perf_counter() - start


def main() -> None:
    """Measure all in turn, so that a busy machine slows both sides alike."""
    command = ["-m", "kappascope", "diagnose"]
    refused = {
        "a path that does not exist": [*command, "nowhere.pt"],
        "a name of the Hub": [*command, "org/name"],
        "a wrong option": [*command, "--nonsense", "model.pt"],
        "a text file": [*command, "notes.txt"],
        "a size that is none": [*command, "notes.txt", "--memory", "much"],
    }
    ratios: dict[str, list[float]] = {name: [] for name in refused}
    imports = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "notes.txt").write_text("# Notes\nnothing here\n")
        seconds(["-c", "import torch"], folder)  # the first reads the disk
        for _ in range(ROUNDS):
            imports.append(seconds(["-c", "import torch"], folder))
            for name, arguments in refused.items():
                ratios[name].append(seconds(arguments, folder) / imports[-1])
    document = {
        "environment": dict(environment()),
        "rounds": ROUNDS,
        "import_torch_seconds": statistics.median(imports),
        "limit": LIMIT,
        "ratios": {name: statistics.median(those) for name, those in ratios.items()},
        "largest": {name: max(those) for name, those in ratios.items()},
    }
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    for name, ratio in document["ratios"].items():
        print(f"{ratio:.3f} of import torch: {name}")


if __name__ == "__main__":
    main()
