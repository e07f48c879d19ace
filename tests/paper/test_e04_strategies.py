"""Experiment 4: corrective strategies (Section 4.4)."""

from experiment_rows import mean, numbers, prints, run
from kappascope.lab.tasks import Own, Paper


def test_experiment_4_prints_its_digits() -> None:
    found = run(4, Paper(range(10)), size=64)

    def error(strategy: str, component: str) -> float:
        return mean(found, strategy=strategy, component=component)

    kappa, norm = error("standard", "condition_number"), error("standard", "row_norms")
    assert prints(kappa, "1.23") and prints(norm, "0.134")
    for strategy, at_norm, at_kappa in [
        ("multipliers", 67, 10),
        ("spectral", 0, 77),
        ("svd", 64, 32),
    ]:
        assert round(100 * (1 - error(strategy, "row_norms") / norm)) == at_norm
        assert round(100 * (1 - error(strategy, "condition_number") / kappa)) == at_kappa
    assert prints(error("spectral", "condition_number"), "0.29")


def test_multipliers_at_the_full_rate_learn_norms_faster_than_at_a_tenth() -> None:
    found = run(4, Own(range(4), "full rate"), size=16)
    tenth, full = (
        numbers(found, strategy=name, component="row_norms")
        for name in ("multipliers", "full multipliers")
    )
    assert (full < tenth).all()
    spectrum = numbers(found, strategy="re-projection", component="singular_values")
    assert (spectrum < 1e-6).all()  # the last of its steps is one of re-projection
