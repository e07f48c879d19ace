"""The parts of a matrix of which one may ask whether they are learned, each a single number.

Norms and singular values are on log scales, where a difference of 0.1 is ten per cent of any of
them; shares and alignments lie between -1 and 1. What an equivalent network may choose freely (how
a head shares its scale between query and key, or a norm's gain with the matrix behind it) is no
part of one factor: pass the product, or the matrix with the gain folded in.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from jaxtyping import Float
from torch import Tensor

from kappascope.matrix import spectra

DECILES = tuple(range(90, 0, -10))  # of the spectrum, from the top
RANK_THRESHOLD = 0.01  # of the largest singular value: the paper's
EDGE = 0.1  # of the singular directions of the start, at either end

PARTS: Mapping[str, str] = MappingProxyType({
    "log_norm": "log of the root mean square entry",
    "row_spread": "standard deviation of the log norms of the rows",
    "column_spread": "standard deviation of the log norms of the columns",
    "log_sigma_1": "log of the largest singular value",
    **{f"log_sigma_{d}": f"log of the singular value above {d} % of them" for d in DECILES},
    "log_sigma_min": "log of the smallest singular value",
    "log_kappa": "log of the condition number",
    "log_stable_rank": "log of the squared Frobenius norm over the squared spectral norm",
    "effective_rank": "share of the singular values above 1 % of the largest",
    "alignment": "cosine of the angle to the start",
    "top_alignment": "share of the squared norm along the start's upper tenth of directions",
    "bottom_alignment": "share of the squared norm along the start's lower tenth of directions",
})  # fmt: skip


def spectral_parts(values: Float[Tensor, "*stack rank"]) -> dict[str, Float[Tensor, "*stack"]]:
    """Return the parts that singular values tell, largest first, of a matrix or of a product.

    >>> found = spectral_parts(torch.tensor([[4.0, 2.0, 1.0]]).double())
    >>> round(float(found["log_kappa"].exp()), 6), round(float(found["log_sigma_50"].exp()), 6)
    (4.0, 2.0)
    """
    s = values.double()
    logs = s.clamp(min=torch.finfo(torch.float64).tiny).log()
    levels = torch.tensor([d / 100 for d in DECILES], dtype=torch.float64, device=s.device)
    deciles = torch.quantile(logs, levels, dim=-1)
    top, bottom, square = logs[..., 0], logs[..., -1], s.square().sum(-1)
    return {
        "log_sigma_1": top,
        **{f"log_sigma_{d}": at for d, at in zip(DECILES, deciles, strict=True)},
        "log_sigma_min": bottom,
        "log_kappa": top - bottom,
        "log_stable_rank": square.log() - 2 * top,
        "effective_rank": (s > RANK_THRESHOLD * s[..., :1]).double().mean(-1),
    }


class StartFrame:
    """The start of a matrix with its singular directions, in which later ones are seen."""

    def __init__(self, start: Float[Tensor, "out in"]) -> None:
        self.start = start.detach()
        u, _, vt = spectra.decomposition(self.start)
        edge = max(1, round(EDGE * vt.shape[-2]))
        self.norm = torch.linalg.matrix_norm(self.start.double())
        self.edges = {
            "top_alignment": (u[..., :edge], vt[..., :edge, :]),
            "bottom_alignment": (u[..., -edge:], vt[..., -edge:, :]),
        }

    def alignments(self, matrix: Float[Tensor, "*stack out in"]) -> dict[str, Tensor]:
        """Measure how far a matrix, or each of a stack, still lies along the start.

        >>> found = StartFrame(torch.eye(10)).alignments(2 * torch.eye(10))
        >>> round(float(found["alignment"]), 6), round(float(found["top_alignment"]), 6)
        (1.0, 0.1)
        """
        square = matrix.double().square().sum((-2, -1))
        inner = (matrix.double() * self.start.to(matrix.device).double()).sum((-2, -1))
        found = {"alignment": inner / (square.sqrt() * self.norm).clamp(min=1e-300)}
        for name, (u, vt) in self.edges.items():
            along = torch.einsum("ok,...oi,ki->...k", u.to(matrix), matrix, vt.to(matrix))
            found[name] = along.double().square().sum(-1) / square.clamp(min=1e-300)
        return found


def matrix_parts(
    matrix: Float[Tensor, "*stack out in"], frame: StartFrame | None = None
) -> dict[str, Float[Tensor, "*stack"]]:
    """Return every part of a matrix, or of each of a stack; alignments where the start is given.

    >>> found = matrix_parts(torch.diag(torch.tensor([3.0, 4.0])))
    >>> round(float(found["log_norm"].exp()), 6), list(found) == list(PARTS)[: len(found)]
    (2.5, True)
    """
    entries = matrix.detach()
    square = entries.double().square()
    tiny = torch.finfo(torch.float64).tiny
    rows, columns = (square.sum(dim).clamp(min=tiny).log() / 2 for dim in (-1, -2))
    return {
        "log_norm": square.mean((-2, -1)).clamp(min=tiny).log() / 2,
        "row_spread": rows.std(-1, correction=0),
        "column_spread": columns.std(-1, correction=0),
        **spectral_parts(torch.linalg.svdvals(entries)),
        **({} if frame is None else frame.alignments(entries)),
    }
