"""What rules are given: all matrices of a model share its chance of a false alarm."""

import torch

from ill_matrices import findings, trained, with_values
from kappascope.clinic.examine import examine


def test_bonferroni_shares_the_chance_among_all_matrices() -> None:
    values = torch.linspace(3, 0.5, 64).double()
    values[-1] = 1e-6
    row = examine("w", with_values(values, 64, 64))
    alone = {one.rule for one in findings([row])}
    many = findings([row, *(examine(f"{i}", trained()) for i in range(200))])
    assert "ill-conditioned" in alone
    assert "ill-conditioned" not in {one.rule for one in many}
