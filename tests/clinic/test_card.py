"""The card of a page: a word that agrees with the findings, and facts that agree with the rows."""

import math

import torch

from kappascope.clinic.card import Card, spark_paths
from kappascope.clinic.diagnose import diagnose


def test_the_word_agrees_with_the_worst_finding() -> None:
    torch.manual_seed(0)
    well = torch.randn(64, 32)
    broken, dead = well.clone(), well.clone()
    broken[0, 0] = math.nan
    dead[3:9] = 0
    cards = [
        Card.of(diagnose({"layers.0.up_proj.weight": weight, "layers.1.up_proj.weight": well}))
        for weight in (well, dead, broken)
    ]
    assert cards[0].status == "Sound" and not cards[0].facts[0].severity
    assert cards[1].severity == cards[1].facts[0].severity != ""
    assert cards[2].status == "Broken"
    for card in cards:
        assert 3 <= len(card.facts) <= 5


def test_facts_have_the_numbers_of_their_rows() -> None:
    torch.manual_seed(0)
    weak = torch.diag(torch.logspace(0, -4, 40)) @ torch.randn(40, 40)
    found = diagnose({"a.weight": weak, "b.weight": torch.randn(40, 20)})
    told = " ".join(fact.text for fact in Card.of(found).facts)
    row = found["a"]
    assert f"ffective rank {row.effective_rank}," in told and f"{row.kappa:,.0f}" in told


def test_what_is_below_chance_is_not_called_above_it() -> None:
    flat, stretched = torch.eye(32), torch.diag(torch.logspace(0, 4, 32))
    for weight, place in ((flat, "nearest to chance"), (stretched, "farthest above chance")):
        texts = [fact.text for fact in Card.of(diagnose({"a.weight": weight})).facts]
        assert sum(f"condition number {place} is" in text for text in texts) == 1


def test_a_small_spectrum_stays_in_its_frame() -> None:
    torch.manual_seed(0)
    for weight in (torch.randn(50, 30), torch.eye(4), 1e200 * torch.randn(9, 9).double()):
        (row,) = diagnose({"w": weight}).matrices
        paths = spark_paths(row)
        assert paths
        numbers = [
            float(x) for path in paths for x in path.replace("M", "").replace("L", " ").split()
        ]
        assert numbers and min(numbers) >= 0 and max(numbers) <= 132
    assert spark_paths(diagnose({"w": torch.zeros(3, 3)}).matrices[0]) is None
