"""Add a rule of your own to the diagnosis: one function under a decorator."""

import torch

import kappascope
from kappascope.clinic.examination import Examination
from kappascope.clinic.symptoms import RULES, Measurements, Symptom, rule

LIMIT = 100.0  # a Frobenius norm that none of our layers should have


@rule("harm")
def enormous_norm(matrix: Examination, model: Measurements) -> Symptom | None:
    """Speak of every matrix whose Frobenius norm is beyond the limit."""
    norm = matrix.frobenius_norm
    if norm is None or norm <= LIMIT:
        return None
    return Symptom("warning", f"its norm is {norm:.0f}", "look at its learning rate")


try:
    weights = {"small.weight": torch.randn(32, 32), "large.weight": 10 * torch.randn(32, 32)}
    found = kappascope.diagnose(weights)
finally:
    del RULES["enormous-norm"]  # whoever runs this inside a larger program gets the usual rules

told = [one.subject for one in found.findings if one.rule == "enormous-norm"]
assert told == ["large.weight"]
print("enormous-norm in", *told)
