"""What chance and plain optimization give: closed forms and models, one function an equation."""

from kappascope.theory.nulls import (
    GaussianNull,
    MarchenkoPastur,
    hard_edge_log_cdf,
    square_limit_cdf,
    square_limit_quantile,
    tail_bounds,
    tracy_widom_cdf,
)
from kappascope.theory.relaxation import Relaxation, predicted_weights

__all__ = [
    "GaussianNull",
    "MarchenkoPastur",
    "Relaxation",
    "hard_edge_log_cdf",
    "predicted_weights",
    "square_limit_cdf",
    "square_limit_quantile",
    "tail_bounds",
    "tracy_widom_cdf",
]
