"""Short runs of the study of what is not learned, on a text that needs no download."""

from typing import Any

from kappascope.lab.resume import ResumePoint
from kappascope.studies.unlearned import study


def run(seed: int = 0, resume_point: ResumePoint | None = None, **setting: Any) -> list[Any]:
    """Everything a short trial yields but its times."""
    about = {**study.cell("AdamW", 0.5, steps=24), **setting}
    rows = study.trials(seed, resume_point or ResumePoint(), **about)
    return [
        {"experiment": "unlearned", "stream": "own", **about, "seed": seed, **row}
        for row in rows
        if row["component"] != "seconds"
    ]
