"""Many checkpoints at once: a row for each, and the atlas of what their matrices have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from rich.console import RenderableType
from rich.text import Text

from kappascope.clinic.atlas import MIN_MODELS, MIN_TRAINED, Atlas, atlas_of
from kappascope.clinic.diagnosis import Diagnosis, known_median, short_sources
from kappascope.clinic.examination import Examination
from kappascope.pages.rendering import fill
from kappascope.system import files
from kappascope.text import clean, number, plural, ruled_table

NEVER_TRAINED = ("untrained", "zero", "non-finite")  # rules that say a matrix is no trained one
HEADS = "checkpoint", "matrices", "median κ × chance", "largest", "defects", "harms", "gravest"


@dataclass(frozen=True)
class SurveyedModel:
    """What there is to say of one checkpoint among others."""

    name: str
    matrices: int
    median_ratio: float | None
    largest_ratio: float | None
    defects: int
    harms: int
    gravest: str  # the first finding that can be acted on

    @classmethod
    def of(cls, name: str, diagnosis: Diagnosis) -> SurveyedModel:
        """Summarize the diagnosis of a checkpoint."""
        ratios = [row.ratio for row in diagnosis.analysed if not row.is_bounded]
        acted = [finding for finding in diagnosis.findings if finding.concern != "observation"]
        return cls(
            name,
            len(diagnosis.analysed),
            known_median(ratios),
            max((ratio for ratio in ratios if ratio is not None), default=None),
            sum(finding.concern == "defect" for finding in acted),
            sum(finding.concern == "harm" for finding in acted),
            f"{acted[0].rule} in {acted[0].subject}" if acted else "",
        )

    @property
    def cells(self) -> tuple[str, ...]:
        """The numbers and words of its row."""
        ratios = (number(value, 2) for value in (self.median_ratio, self.largest_ratio))
        counts = str(self.defects), str(self.harms)
        return self.name, str(self.matrices), *ratios, *counts, self.gravest


@dataclass(frozen=True)
class Surveyed:
    """The checkpoints of a survey and the atlas of their trained matrices."""

    models: tuple[SurveyedModel, ...]
    atlas: Atlas
    left_out: int  # matrices that were never trained

    @classmethod
    def of(cls, diagnoses: Sequence[Diagnosis]) -> Surveyed:
        """Gather diagnoses, each of a model of its own.

        >>> import torch
        >>> from kappascope.clinic.diagnose import diagnose
        >>> Surveyed.of([diagnose({"up.weight": torch.eye(3)})]).models[0].matrices
        1
        """
        names = short_sources(diagnoses)
        trained = [[row for row in one.analysed if is_trained(row)] for one in diagnoses]
        sources = [
            {"name": name, "files": [_source(file) for file in one.files], "matrices": len(rows)}
            for name, one, rows in zip(names, diagnoses, trained, strict=True)
        ]
        atlas = atlas_of(
            [
                (name, rows, one.products)
                for name, one, rows in zip(names, diagnoses, trained, strict=True)
            ],
            sources,
            files.environment(),
        )
        every = sum(len(one.analysed) for one in diagnoses)
        models = tuple(SurveyedModel.of(*pair) for pair in zip(names, diagnoses, strict=True))
        return cls(models, atlas, every - sum(map(len, trained)))

    def table(self) -> RenderableType:
        """Return a row for each checkpoint."""
        drawn = ruled_table(*HEADS, numbers=range(1, len(HEADS) - 1))
        for model in self.models:
            drawn.add_row(*(Text(clean(cell)) for cell in model.cells))
        return drawn

    def lines(self) -> Iterator[str]:
        """Yield sentences on what the atlas holds."""
        ranges = self.atlas.ranges
        matrices = sum(int(source["matrices"]) for source in self.atlas.sources)
        models = plural(len(self.models), "model")
        yield f"The atlas has {plural(matrices, 'trained matrix', 'trained matrices')} of {models}."
        if self.left_out:
            yield f"{plural(self.left_out, 'matrix was', 'matrices were')} left out: never trained."
        enough = sum(found.is_telling for found in ranges.values())
        least = f"{MIN_TRAINED} matrices of {MIN_MODELS} models or more"
        yield f"{enough} of {len(ranges)} ranges have {least}, which rules ask for."

    def html(self) -> str:
        """Return the page of the survey, which needs no network."""
        ranges = [
            (kind, shape, quantity.replace("_", " "), found)
            for (kind, shape, quantity), found in sorted(self.atlas.ranges.items())
        ]
        return fill(
            "survey",
            heads=HEADS,
            models=self.models,
            lines=list(self.lines()),
            ranges=ranges,
            fewest=MIN_TRAINED,
            provenance_of=self.atlas.provenance,
            sources=self.atlas.sources,
        )


def is_trained(row: Examination) -> bool:
    """Tell whether nothing speaks against a matrix having been trained.

    >>> is_trained(Examination("w", (2, 2), "float32", "ok"))
    True
    """
    told = any(finding.rule in NEVER_TRAINED for finding in row.findings)
    return not told and not row.sinusoidal


def _source(file: files.FileDigest) -> dict[str, object]:
    """Return a file without the folders of somebody's machine."""
    return {"file": PurePath(file.path).name, "size": file.size, "sha256": file.sha256}
