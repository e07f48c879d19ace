"""Claims of the digits, on rows made by hand."""

from digit_rows import made
from kappascope.lab.claims import judge
from kappascope.lab.figures import NOTHING
from kappascope.lab.statistics import Estimate
from kappascope.lab.table import Table
from kappascope.studies.digits import claims
from kappascope.studies.digits.study import STUDY


class TestClaims:
    WORDS = ("accuracy", "calibration", "noise", "quantization")

    def verdict(self, word: str, rows: Table) -> str:
        [claim] = [claim for claim in STUDY.claims if claim.id == f"digits.{word}"]
        return judge(claim, rows).verdict

    def test_hold_where_kappa_tells_more_than_the_norms(self, kappa_tells: Table) -> None:
        assert {self.verdict(f"kappa-{word}", kappa_tells) for word in self.WORDS} == {"holds"}
        assert self.verdict("norms-first", kappa_tells) == "fails"

    def test_fail_where_kappa_is_the_norms_shadow(self) -> None:
        rows = made(lambda k, s, noise: s + noise)
        alone = claims.Correlation("condition_number", "error", given=()).across(rows)
        assert alone.low and alone.low > 0.3  # it does go with the error
        assert {self.verdict(f"kappa-{word}", rows) for word in self.WORDS} == {"fails"}
        assert self.verdict("norms-first", rows) == "holds"

    def test_no_other_component_is_made_to_tell(self, kappa_tells: Table) -> None:
        assert self.verdict("others", kappa_tells) != "holds"

    def test_the_first_matrix_that_stays_as_it_began_is_not_learned(
        self, kappa_tells: Table
    ) -> None:
        assert self.verdict("first-layer", kappa_tells) == "undecided"  # in full: no interval

    def test_networks_that_did_not_arrive_are_left_out(self, kappa_tells: Table) -> None:
        assert len(claims.arrived(kappa_tells).draw) == 80 * 6 - 1

    def test_the_largest_correlation_is_large_on_either_side(self) -> None:
        ends = [(-0.5, -0.4), (-0.1, 0.2)]
        parts = [
            lambda rows, ends=(low, high): Estimate(
                sum(ends) / 2, *ends, 9, "", at=lambda level, ends=ends: ends
            )
            for low, high in ends
        ]
        found = claims.largest(parts)(NOTHING)
        assert (found.value, found.interval) == (0.45, (0.4, 0.5))
