"""What chance and plain optimization give: closed forms and models, one function an equation.

`nulls`: random matrices. `relaxation`, `inputs`: SGD on one matrix, for white and other inputs.
`conditioning`: the law of kappa's error, and a bound. `depth`, `gradients`: products of layers.
`updates`: one step of SGD, Adam and Muon. docs/theory.md derives them.
"""

from kappascope.matrix.orthogonal import newton_schulz
from kappascope.theory.conditioning import (
    direction_bound,
    disturbance,
    floor_ratio,
    hard_edge_scale,
    kappa_error_cdf,
    kappa_error_quantile,
    kappa_error_tail,
    log_kappa_bound,
    smallest_value_quantile,
    weyl_bound,
)
from kappascope.theory.depth import flow, learning_time, mode_kappa, mode_path, mode_speed, product
from kappascope.theory.gradients import (
    gradient_bounds,
    log_gradient_norm,
    log_kappa_rate,
    lyapunov_exponents,
)
from kappascope.theory.inputs import Directions, steps_to_learn
from kappascope.theory.nulls import (
    GaussianNull,
    MarchenkoPastur,
    hard_edge_log_cdf,
    square_limit_cdf,
    square_limit_quantile,
    tail_bounds,
    tracy_widom_cdf,
)
from kappascope.theory.relaxation import Relaxation, predicted_weights, walk
from kappascope.theory.updates import (
    adam_leading_change,
    adam_update,
    blind_change,
    full_gradient_change,
    muon_update,
    sgd_update,
    singular_value_change,
)

__all__ = [
    "Directions",
    "GaussianNull",
    "MarchenkoPastur",
    "Relaxation",
    "adam_leading_change",
    "adam_update",
    "blind_change",
    "direction_bound",
    "disturbance",
    "floor_ratio",
    "flow",
    "full_gradient_change",
    "gradient_bounds",
    "hard_edge_log_cdf",
    "hard_edge_scale",
    "kappa_error_cdf",
    "kappa_error_quantile",
    "kappa_error_tail",
    "learning_time",
    "log_gradient_norm",
    "log_kappa_bound",
    "log_kappa_rate",
    "lyapunov_exponents",
    "mode_kappa",
    "mode_path",
    "mode_speed",
    "muon_update",
    "newton_schulz",
    "predicted_weights",
    "product",
    "sgd_update",
    "singular_value_change",
    "smallest_value_quantile",
    "square_limit_cdf",
    "square_limit_quantile",
    "steps_to_learn",
    "tail_bounds",
    "tracy_widom_cdf",
    "walk",
    "weyl_bound",
]
