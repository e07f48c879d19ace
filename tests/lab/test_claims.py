"""Printed figures are held to their digits; verdicts follow the interval, never the point."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict

import numpy as np
import pytest
import scipy
from hypothesis import assume, given
from hypothesis import strategies as st

from kappascope.lab.claims import (
    SMALLEST_P,
    WITHOUT_MEAN,
    Above,
    Basis,
    Below,
    Between,
    Claim,
    Expectation,
    Printed,
    check,
    judge,
    no_mean,
    printed_numbers,
)
from kappascope.lab.statistics import Estimate, exactly, mean, median, proportion, ratio
from kappascope.lab.table import Table

NOTHING = Table.of([])
DIGITS, NEARLY, DIFFERS = "to its digits", "within 0.1 %", "differs"


def rows(values: np.ndarray | list[float], **setting: object) -> Table:
    return Table.of({**setting, "seed": k, "error": float(x)} for k, x in enumerate(values))


def agreement(printed: str, measured: object) -> str:
    return str(check(Printed("e1/x", "x", printed, lambda table: measured), NOTHING)["agreement"])


class TestPrinted:
    @pytest.mark.parametrize(
        ("printed", "measured", "expected"),
        [  # the figures of the paper, its slides and its review, with the recovered numbers
            ("0.27", 0.273, DIGITS),
            ("34.9", 34.94, DIGITS),
            ("126.8", 126.8, DIGITS),
            ("1.59", 2.775, DIFFERS),
            ("~0.13", 0.1320, DIGITS),
            ("~0.13", 0.1361, DIFFERS),
            ("~0.001", 0.0012, DIGITS),
            ("~1.23", 1.2329, DIGITS),
            ("~1.23", 1.237, DIFFERS),
            ("0.90", 0.902, DIGITS),
            ("0.90", 0.906, DIFFERS),
            ("67 %", 66.8, DIGITS),
            ("67%", 0.668, DIFFERS),
            ("~928", 927.77, DIGITS),
            ("1,510", 1509.7, DIGITS),
            ("653", 653.20, DIGITS),
            ("653×", 653.20, DIGITS),
            ("242,566", 242_566.3, DIGITS),
            ("13,167", 13_166.75, DIGITS),
            ("13,167", 13_170.0, NEARLY),
            ("13,167x", 13_190.0, DIFFERS),
            ("4.8e6", 4_786_598, DIGITS),
            ("4.8×10^6", 4_786_598, DIGITS),
            ("6.6e-5", 6.62e-5, DIGITS),
            ("6.6×10^{-5}", 6.62e-5, DIGITS),
            ("1.2e-3", 1.26e-3, DIFFERS),
            ("440", 379.0, DIFFERS),
            ("250", 262.0, DIFFERS),
            ("1.0x", 0.997, DIGITS),
            ("-23 %", -23.4, DIGITS),
            ("0.03-0.13", (0.029, 0.06, 0.125), DIGITS),
            ("0.03–0.13", [0.125, 0.029], DIGITS),
            ("1,000-1,600", np.array([1353.0, 1194.0]), DIFFERS),
            ("10–100×", (10.3, 99.8), DIGITS),
            ("0.030-0.040", (0.0302, 0.0402), DIGITS),
            ("0.030-0.040", (0.0302, 0.0406), DIFFERS),
            ("2", Estimate(2.2, 1, 3, 9, "mean"), DIGITS),
            ("2", math.nan, "not measured"),
            ("1-2", (1.0, math.inf), "not measured"),
        ],
    )
    def test_matches_after_rounding_or_within_a_thousandth(
        self, printed: str, measured: object, expected: str
    ) -> None:
        assert agreement(printed, measured) == expected

    @given(
        st.floats(1e-9, 1e9),
        st.integers(0, 6),
        st.sampled_from(["{:.{}f}", "{:,.{}f}", "~{:.{}f}", "{:.{}e}", "{:.{}f} %"]),
    )
    def test_what_python_prints_matches_what_it_printed(
        self, x: float, digits: int, style: str
    ) -> None:
        assert agreement(style.format(x, digits), x) == DIGITS

    @given(st.integers(1, 9999), st.integers(-4, 4), st.floats(0.51, 3))
    def test_a_unit_of_the_last_digit_away_does_not_match(
        self, mantissa: int, power: int, units: float
    ) -> None:
        assume(abs(units - 0.001 * mantissa) > 1e-6)  # nobody asks what is exactly 0.1 %
        x = mantissa * 10.0**power
        off = x + units * 10.0**power
        assert (agreement(f"{mantissa}e{power}", off) == DIFFERS) == (units > 0.001 * mantissa)

    def test_a_tie_may_have_been_rounded_either_way(self) -> None:
        assert agreement("0.12", 0.125) == agreement("0.13", 0.125) == DIGITS
        assert agreement("0.27", 0.275) == agreement("0.28", 0.275) == DIGITS

    @pytest.mark.parametrize(
        "printed", ["0.27 ± 0.31", "", "about 3", "1.2.3", "1,00", "0.8 -> 250"]
    )
    def test_anything_else_is_refused_when_it_is_written_down(self, printed: str) -> None:
        with pytest.raises(ValueError, match="expected one number as printed"):
            Printed("e1/x", "x", printed, lambda table: 1.0)

    def test_a_range_needs_more_than_one_number_and_a_number_no_range(self) -> None:
        with pytest.raises(ValueError, match="expected 2 measured"):
            agreement("0.03-0.13", 0.05)
        with pytest.raises(ValueError, match="expected 1 measured"):
            agreement("0.03", (0.03, 0.04))

    def test_record_has_the_printed_string_and_the_full_number(self) -> None:
        printed = Printed(
            "e1/row_norms/d=32/mean", "row norms", "~0.13", lambda t: mean(t.values()).value
        )
        assert check(printed, rows([0.131234, 0.133]).where(seed=0)) == {
            "id": "e1/row_norms/d=32/mean",
            "experiment": "e1",
            "what": "row norms",
            "printed": "~0.13",
            "measured": 0.131234,
            "matches": True,
            "agreement": DIGITS,
            "category": "matched",
        }

    @pytest.mark.parametrize(
        ("basis", "category"),
        [
            ("protocol", "matched"),
            ("conjecture", "matched by conjecture"),
            ("fitted", "fitted"),
            ("repeated", "repeated"),
        ],
    )
    def test_a_match_is_worth_what_it_stands_on(self, basis: Basis, category: str) -> None:
        figure = Printed("e1/x", "x", "2", lambda t: 2.0, basis)
        assert check(figure, NOTHING)["category"] == category
        missed = Printed("e1/x", "x", "3", lambda t: 2.0, basis)
        assert check(missed, NOTHING)["category"] == "not matched"

    @pytest.mark.parametrize("measured", [math.nan, math.inf, (1.0, math.nan), np.float32(2)])
    def test_record_is_strict_json(self, measured: object) -> None:
        printed = Printed(
            "e1/x", "x", "1-2" if isinstance(measured, tuple) else "2", lambda t: measured
        )
        json.dumps(check(printed, NOTHING), allow_nan=False)

    def test_ends_of_a_number_are_one(self) -> None:
        assert [end.value for end in printed_numbers("~1,136")] == [1136.0]


class TestExpectation:
    GRID = (-math.inf, -1.0, 0.0, 0.5, 1.0, 2.0, math.inf)

    @pytest.mark.parametrize(
        ("expect", "member"),
        [
            (Above(0.5), lambda x: x > 0.5),
            (Below(0.5), lambda x: x < 0.5),
            (Between(0.0, 1.0), lambda x: 0 <= x <= 1),
            (Between(0.5, 0.5), lambda x: x == 0.5),
        ],
        ids=["above", "below", "between", "a point"],
    )
    def test_decides_as_if_every_point_of_the_interval_were_asked(
        self, expect: Expectation, member: Callable[[float], bool]
    ) -> None:
        for i, low in enumerate(self.GRID):
            for high in self.GRID[i:]:
                inside = {member(x) for x in np.clip(np.linspace(-9, 9, 73), low, high)}
                oracle = {(True,): "holds", (False,): "fails"}.get(tuple(inside), "undecided")
                assert expect.decide(Estimate(0.3, low, high, 9, "x")) == oracle

    @pytest.mark.parametrize("expect", [Above(0), Below(0), Between(-1, 1)], ids=repr)
    def test_a_number_without_interval_decides_nothing(self, expect: Expectation) -> None:
        assert expect.decide(Estimate(99.0, None, None, 3, "median", "too few")) == "undecided"

    def test_bounds_the_wrong_way_round_are_refused(self) -> None:
        with pytest.raises(ValueError, match="low <= high"):
            Between(1, 0)

    @pytest.mark.parametrize("n", [10, 30, 300])
    def test_a_claim_at_its_bound_is_rarely_decided(self, n: int) -> None:
        """True median 1: "above 1" is false, yet only 1 sample in 40 may call it proven."""
        values = np.random.default_rng(n).lognormal(size=(2000, n))
        outcomes = [Above(1.0).decide(median(x)) for x in values]
        assert outcomes.count("holds") < 0.035 * 2000
        assert outcomes.count("fails") < 0.035 * 2000


def claim(*estimates: Estimate, **change: object) -> Claim:
    """A claim that every one of its measures, a, b, ..., exceeds one."""
    names = "abcd"[: len(estimates)]
    fields: dict[str, object] = {
        "id": "e1.kappa-grows",
        "sentence": "it exceeds one",
        "source": "P 4.1",
        "measures": {name: (lambda rows, e=e: e) for name, e in zip(names, estimates, strict=True)},
        "expect": {name: Above(1) for name in names},
        "explain": "It is {a:.1f}.",
    }
    return Claim(**(fields | change))  # type: ignore[arg-type]


HOLDS = Estimate(3.0, 2.0, 4.0, 30, "ratio")
FAILS = Estimate(0.3, 0.2, 0.4, 20, "ratio")
STRADDLES = Estimate(1.3, 0.2, 2.4, 10, "ratio")
BARE = Estimate(5.0, None, None, 4, "median", "it needs 6 values")
VOID = Estimate(math.nan, None, None, 0, "median", "there are no values", 3)


class TestJudge:
    @pytest.mark.parametrize(
        ("estimates", "verdict", "deciding"),
        [
            ((HOLDS,), "holds", HOLDS),
            ((FAILS,), "fails", FAILS),
            ((BARE,), "undecided", BARE),
            ((HOLDS, HOLDS), "holds", HOLDS),
            ((HOLDS, FAILS, STRADDLES), "fails", FAILS),
            ((STRADDLES, FAILS), "fails", FAILS),
            ((HOLDS, STRADDLES), "undecided", STRADDLES),
            ((HOLDS, BARE), "undecided", BARE),
        ],
    )
    def test_the_weakest_part_decides(
        self, estimates: tuple[Estimate, ...], verdict: str, deciding: Estimate
    ) -> None:
        found = judge(claim(*estimates), NOTHING)
        assert found.verdict == verdict
        assert (found.measured, found.interval) == (deciding.value, deciding.interval)
        assert found.n == deciding.n

    def test_a_measure_is_a_function_of_the_rows(self) -> None:
        plain = claim(
            measures={"error": lambda rows: median(rows.values())},
            expect={"error": Below(0.5)},
            explain="It is {error:.2f}.",
        )
        verdict = judge(plain, rows(np.linspace(0.1, 0.2, 15)))
        assert (verdict.verdict, verdict.n) == ("holds", 15)
        assert verdict.explanation == "It is 0.15 [0.12, 0.18]."

    def test_an_explanation_may_be_a_function_of_the_estimates_and_the_verdict(self) -> None:
        explain = lambda a, b, verdict: f"{a.value} and {b.value}: {verdict}"  # noqa: E731
        assert (
            judge(claim(HOLDS, FAILS, explain=explain), NOTHING).explanation == "3.0 and 0.3: fails"
        )

    def test_an_explanation_says_why_nothing_was_decided(self) -> None:
        found = judge(claim(BARE), NOTHING).explanation
        assert found == "It is 5.0. No interval for the median: it needs 6 values."

    def test_an_explanation_counts_what_is_missing(self) -> None:
        lost = Estimate(3.0, 2.0, 4.0, 30, "median", None, 2)
        found = judge(claim(lost), NOTHING).explanation
        assert found == "It is 3.0 [2.0, 4.0]. The median leaves out 2 missing values."

    def test_a_quantity_that_does_not_exist_makes_the_claim_ill_posed(self) -> None:
        found = judge(claim(HOLDS, presumes=lambda table: "There is no mean."), NOTHING)
        assert found.verdict == "ill-posed"
        assert found.explanation == "There is no mean. It is 3.0 [2.0, 4.0]."
        assert judge(claim(HOLDS, presumes=lambda table: None), NOTHING).verdict == "holds"

    def test_the_experiment_is_the_first_part_of_the_id(self) -> None:
        assert judge(claim(HOLDS), NOTHING).experiment == "e1"
        assert judge(claim(HOLDS, id="all.persists"), NOTHING).experiment == "all"

    @pytest.mark.parametrize(
        "estimate", [HOLDS, BARE, VOID, Estimate(1.0, 0.5, math.inf, 9, "ratio")]
    )
    def test_a_verdict_is_strict_json_with_null_for_what_is_no_number(
        self, estimate: Estimate
    ) -> None:
        record = json.loads(json.dumps(asdict(judge(claim(estimate), NOTHING)), allow_nan=False))
        assert list(record) == [
            *("id", "experiment", "sentence", "source", "verdict"),
            *("measured", "interval", "n", "explanation"),
            *("alone", "p", "p_page", "p_all", "printed_mean", "mended", "estimates"),
        ]
        assert record["measured"] == (None if math.isnan(estimate.value) else estimate.value)
        assert (record["interval"] is None) == (estimate.interval is None)

    def test_a_fact_that_was_counted_can_hold(self) -> None:
        same = claim(exactly(0.0, 15, "targets that differ"), expect={"a": Between(0, 0)})
        assert judge(same, NOTHING).verdict == "holds"

    def test_a_group_nobody_ran_leaves_a_comparison_undecided(self) -> None:
        table = rows(np.linspace(1, 2, 15), arm="a")
        arms = claim(
            measures={
                "ratio": lambda t: ratio(t.where(arm="a").values(), t.where(arm="b").values())
            },
            expect={"ratio": Above(1)},
            explain="{ratio}",
        )
        found = judge(arms, table)
        assert (found.verdict, found.measured) == ("undecided", None)
        assert "there are no values" in found.explanation


class TestNamedMeasures:
    def test_a_measure_of_which_nothing_is_expected_is_told_and_decides_nothing(self) -> None:
        found = judge(
            claim(
                measures={"other": lambda rows: FAILS, "ratio": lambda rows: HOLDS},
                expect={"ratio": Above(1)},
                explain="It is {ratio:.1f} and {other.value:.1f}: {verdict}.",
            ),
            NOTHING,
        )
        assert (found.verdict, found.n) == ("holds", 30)
        assert found.explanation == "It is 3.0 [2.0, 4.0] and 0.3: holds."

    def test_the_first_of_the_weakest_parts_decides_in_the_order_of_what_is_expected(self) -> None:
        measures = {"a": lambda rows: STRADDLES, "b": lambda rows: BARE, "c": lambda rows: HOLDS}
        for order, n in (("cab", STRADDLES.n), ("cba", BARE.n)):
            expect = {name: Above(1) for name in order}
            assert judge(claim(measures=measures, expect=expect, explain=""), NOTHING).n == n

    def test_of_a_family_every_member_must_be_as_expected(self) -> None:
        family = {32: lambda rows: HOLDS, 64: lambda rows: FAILS}
        named = claim(
            measures={"ratios": family},
            expect={"ratios": Above(1)},
            explain="{ratios.span:.1f}; {ratios[64]:.1f}; {ratios.names_first:.0f}; {ratios.n}",
        )
        found = judge(named, NOTHING)
        assert (found.verdict, found.n) == ("fails", FAILS.n)
        assert found.explanation == "0.3 to 3.0; 0.3 [0.2, 0.4]; 32 3 [2, 4], 64 0 [0, 0]; 20 to 30"

    @pytest.mark.parametrize(
        ("expect", "explain"), [({"ratoi": Above(1)}, ""), ({"ratio": Above(1)}, "{ratoi.n}")]
    )
    def test_a_name_that_is_not_measured_is_refused(self, expect: object, explain: str) -> None:
        with pytest.raises(ValueError, match="speaks of ratoi and measures ratio"):
            claim(measures={"ratio": lambda rows: HOLDS}, expect=expect, explain=explain)

    def test_a_claim_that_expects_nothing_is_refused(self) -> None:
        with pytest.raises(ValueError, match="expects nothing of its measures"):
            claim(measures={"ratio": lambda rows: HOLDS}, expect={}, explain="")


class TestPValues:
    @given(st.integers(6, 40), st.integers(0, 40))
    def test_that_of_a_median_is_the_sign_tests(self, n: int, above: int) -> None:
        above = min(above, n)
        values = [*np.linspace(1, 2, above), *np.linspace(-2, -1, n - above)]
        holds, fails = Above(0).p_values(median(values))
        exact = scipy.stats.binomtest(above, n).pvalue
        least = min(holds, fails)
        assert least == pytest.approx(max(exact, SMALLEST_P), rel=2e-3) or exact > 0.99

    @pytest.mark.parametrize("hits", [0, 2, 5, 14, 20])
    def test_that_of_a_share_is_the_binomial_tests(self, hits: int) -> None:
        least = min(Above(0.5).p_values(proportion(hits, 20)))
        assert least == pytest.approx(scipy.stats.binomtest(hits, 20).pvalue, rel=2e-3)

    def test_a_claim_whose_parts_all_hold_is_as_uncertain_as_the_weakest(self) -> None:
        strong, weak = median(np.linspace(1, 2, 20)), median(np.linspace(1, 2, 7))
        both = judge(claim(strong, weak, expect=dict.fromkeys("ab", Above(0))), NOTHING)
        assert both.p == pytest.approx(2 / 2**7, rel=2e-3)

    def test_one_part_of_many_fails_only_if_it_does_for_their_number(self) -> None:
        weak, fine = median(np.linspace(-2, -1, 7)), median(np.linspace(1, 2, 20))
        alone = judge(claim(weak, expect={"a": Above(0)}), NOTHING)
        of_many = judge(claim(weak, *[fine] * 3, expect=dict.fromkeys("abcd", Above(0))), NOTHING)
        assert (alone.verdict, of_many.verdict) == ("fails", "undecided")
        assert alone.p is not None
        assert of_many.p == pytest.approx(4 * alone.p)

    def test_too_few_seeds_decide_nothing(self) -> None:
        seven = claim(median(np.linspace(1, 2, 7)), expect={"a": Above(0)})
        assert judge(seven, NOTHING, least=7).verdict == "holds"
        found = judge(seven, NOTHING, least=8)
        assert found.verdict == "undecided"
        assert found.explanation.endswith("Fewer than 8 seeds decide nothing.")


class TestNoMean:
    random = np.random.default_rng(42)
    cauchy = np.abs(random.standard_cauchy(1000))
    t3 = np.abs(random.standard_t(3, 1000))

    def test_a_compatible_tail_is_consistent_with_theory(self) -> None:
        reason = no_mean().why(rows(self.cauchy))
        assert reason is not None
        assert reason.startswith(WITHOUT_MEAN + " A tail index of ")
        assert "is consistent with it" in reason

    def test_a_tail_may_contradict_the_theory(self) -> None:
        assert no_mean().why(rows(self.t3)) is None

    @pytest.mark.parametrize("n", [0, 1, 15, 499])
    def test_fewer_than_500_rows_cannot_contradict(self, n: int) -> None:
        assert no_mean().why(Table.of(rows(self.t3).rows.slice(0, n))) == WITHOUT_MEAN

    def test_rows_with_missing_values_cannot_contradict(self) -> None:
        assert no_mean().why(rows([*self.t3, math.nan])) == WITHOUT_MEAN

    def test_looks_only_at_the_rows_it_is_told(self) -> None:
        heavy, light = rows(self.cauchy, component="a"), rows(self.t3, component="b")
        table = Table.of([*heavy.rows.to_pylist(), *light.rows.to_pylist()])
        assert no_mean(component="a").why(table)
        assert no_mean(component="b").why(table) is None

    def test_a_quoted_mean_leaves_the_sentence_to_the_medians(self) -> None:
        found = judge(claim(HOLDS, quotes=no_mean("e1/x/mean")), rows(self.cauchy))
        assert found.verdict == "holds"
        assert found.printed_mean is not None
        assert found.printed_mean["figures"] == ["e1/x/mean"]
        assert judge(claim(HOLDS, quotes=no_mean()), rows(self.t3)).printed_mean is None
