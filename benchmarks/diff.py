"""Does ``kappascope diff`` tell what became of a layer? 200 pairs of checkpoints that say so.

Thirteen of each of ten transformations and fourteen of each of five kinds of damage. A pair is
right if every one of its layers is; damage is called harmless if its layer is said to be the same,
rounded, rearranged or trained. ``python benchmarks/diff.py --out benchmarks/results/diff.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from measuring import environment

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from checkpoint_pairs import drawn_pairs
from kappascope.clinic.diff import diff

TRANSFORMED, DAMAGED = 13, 14  # pairs of each: 130 and 70
FIRST_SEED = 100_000  # pairs from 0 on were looked at while the rules were written
HARMLESS = {"same", "rounding", "rearranged", "trained"}


def main() -> None:
    """Compare all pairs and print how many are right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--first", type=int, default=FIRST_SEED)
    arguments = parser.parse_args()
    total, right, layers, wrong = 0, 0, 0, []
    harmless: list[str] = []
    kinds: dict[str, Counter[str]] = {}
    for pair in drawn_pairs(TRANSFORMED, DAMAGED, arguments.first):
        rows = diff(pair.before, pair.after).layers
        expected = {row: pair.verdicts.get(row.name, pair.others) for row in rows}
        missed = [row for row, verdict in expected.items() if row.verdict != verdict]
        total, right, layers = total + 1, right + (not missed), layers + len(rows)
        kinds.setdefault(pair.kind, Counter())["right" if not missed else "wrong"] += 1
        for row in missed:
            wrong.append(f"{pair.kind}: {row.name or row.before} is {expected[row]}, "
                         f"called {row.verdict} ({row.text})")  # fmt: skip
        seen = {row.name: row.verdict for row in rows}
        if pair.is_damage:
            harmless += [f"{pair.kind}: {name}" for name in pair.verdicts
                         if seen.get(name, "missing") in HARMLESS]  # fmt: skip
    result: dict[str, Any] = {
        "pairs": total,
        "right": right,
        "share": right / total,
        "layers": layers,
        "damage_called_harmless": harmless,
        "wrong": wrong,
        "kinds": {kind: dict(count) for kind, count in sorted(kinds.items())},
        "environment": environment(),
    }
    print(json.dumps(result, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
