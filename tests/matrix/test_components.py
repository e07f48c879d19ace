"""The components of a matrix against slow, obviously right definitions."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kappascope import Components, errors
from kappascope.matrix import spectra

PAPER = {
    "row_norms", "column_norms", "singular_values", "condition_number", "effective_rank",
    "spectral_gap", "frobenius_norm", "overall_matrix",
}  # fmt: skip


def by_hand(matrix: Tensor, threshold: float = 0.01) -> dict[str, np.ndarray]:
    """The definitions, written out with numpy for one matrix."""
    a = matrix.double().numpy()
    s = np.linalg.svd(a, compute_uv=False)
    p = s / s.sum()
    return {
        "row_norms": np.array([math.sqrt(sum(x * x for x in row)) for row in a]),
        "column_norms": np.array([math.sqrt(sum(x * x for x in column)) for column in a.T]),
        "singular_values": s,
        "condition_number": s[0] / s[-1],
        "effective_rank": np.sum(s > threshold * s[0]),
        "spectral_gap": (s[0] - s[1]) / s[0],
        "frobenius_norm": math.sqrt((a * a).sum()),
        "stable_rank": (a * a).sum() / s[0] ** 2,
        "entropy_rank": math.exp(-(p * np.log(p)).sum()),
        "nuclear_norm": s.sum(),
        "log_condition_number": math.log(s[0] / s[-1]),
    }


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(7)


@pytest.mark.parametrize("shape", [(5, 5), (3, 8), (8, 3), (200, 150)])
def test_every_component_agrees_with_its_definition(shape, random) -> None:
    matrix = torch.randn(*shape, generator=random, dtype=torch.float64)
    found = Components(matrix)
    for name, value in by_hand(matrix).items():
        np.testing.assert_allclose(getattr(found, name), value, rtol=1e-9, err_msg=name)


def test_a_stack_gives_what_its_matrices_give_alone(random) -> None:
    stack = torch.randn(2, 3, 6, 4, generator=random)
    found = Components(stack)
    for name in (*Components.names, "stable_rank", "entropy_rank", "nuclear_norm"):
        whole = getattr(found, name)
        for i in range(2):
            for j in range(3):
                alone = getattr(Components(stack[i, j]), name)
                torch.testing.assert_close(whole[i, j], alone, rtol=1e-13, atol=0)


def test_one_factorization_serves_all_components(monkeypatch) -> None:
    calls = []
    original = torch.linalg.svdvals
    monkeypatch.setattr(torch.linalg, "svdvals", lambda a: calls.append(1) or original(a))
    found = Components(torch.randn(6, 6, generator=torch.Generator().manual_seed(0)))
    assert not calls, "nothing is computed before it is asked for"
    for name in (*Components.names, "stable_rank", "entropy_rank", "nuclear_norm"):
        getattr(found, name)
    assert len(calls) == 1


def test_the_threshold_of_the_effective_rank_is_an_argument() -> None:
    matrix = torch.diag(torch.tensor([1.0, 0.05, 0.002]))
    ranks = [int(Components(matrix, t).effective_rank) for t in (0.001, 0.01, 0.1)]
    assert ranks == [3, 2, 1]


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int32]
)
def test_narrow_types_are_up_cast_and_computed_in_float64(dtype) -> None:
    matrix = torch.tensor([[3.0, 0.0], [0.0, 1.0]]).to(dtype)
    found = Components(matrix)
    for name in Components.names:
        assert getattr(found, name).dtype == torch.float64
    assert found.condition_number == 3


@pytest.mark.parametrize("scale", [1e300, 1e-300, 5e-324 / 1e-16])
def test_extreme_scales_neither_overflow_nor_vanish(scale) -> None:
    matrix = scale * torch.tensor([[3.0, 4.0], [4.0, -3.0]], dtype=torch.float64)
    found = Components(matrix)
    torch.testing.assert_close(found.row_norms / scale, torch.full((2,), 5.0).double())
    torch.testing.assert_close(found.frobenius_norm / scale, torch.tensor(50.0).sqrt().double())
    assert found.condition_number == pytest.approx(1)


def test_a_matrix_that_is_not_finite_has_no_spectrum_and_spoils_no_other() -> None:
    stack = torch.eye(3).repeat(3, 1, 1)
    stack[1, 0, 0] = float("nan")
    stack[2, 2, 1] = float("inf")
    found = Components(stack)
    for name in ("condition_number", "effective_rank", "spectral_gap", "stable_rank"):
        value = getattr(found, name)
        assert value[0].isfinite() and value[1:].isnan().all(), name


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (7, 1)])
def test_a_single_row_or_column_has_condition_number_one(shape) -> None:
    found = Components(torch.ones(shape))
    assert (found.condition_number, found.effective_rank, found.spectral_gap) == (1, 1, 1)


def test_a_zero_matrix_has_rank_zero_and_an_infinite_condition_number() -> None:
    found = Components(torch.zeros(3, 3))
    assert found.effective_rank == 0
    assert found.condition_number == math.inf
    assert found.frobenius_norm == 0
    assert found.spectral_gap.isnan()


def test_an_empty_matrix_has_rank_zero() -> None:
    found = Components(torch.zeros(0, 4))
    assert (found.effective_rank, found.frobenius_norm) == (0, 0)
    assert found.singular_values.shape == (0,)


def test_a_vector_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"expected matrices .* got shape \(3,\); reshape first"):
        Components(torch.ones(3))


def test_the_gradient_of_the_caller_is_left_alone() -> None:
    weight = torch.nn.Parameter(torch.eye(3))
    assert not Components(weight).condition_number.requires_grad


class TestErrors:
    def test_the_eight_components_and_the_honest_one_are_there(self) -> None:
        assert set(errors(torch.eye(3), torch.eye(3))) == PAPER | {"log_condition_number"}

    @settings(max_examples=30)
    @given(seed=st.integers(0, 2**32 - 1), shape=st.sampled_from([(4, 4), (3, 6), (6, 3)]))
    def test_each_error_is_that_of_the_definitions(self, seed, shape) -> None:
        random = torch.Generator().manual_seed(seed)
        learned, target = torch.randn(2, *shape, generator=random, dtype=torch.float64)
        ours, theirs = by_hand(learned), by_hand(target)
        found = errors(learned, target)
        for name in PAPER - {"overall_matrix"}:
            expected = np.linalg.norm(ours[name] - theirs[name]) / np.linalg.norm(theirs[name])
            np.testing.assert_allclose(found[name], expected, rtol=1e-8, err_msg=name)
        difference = np.linalg.norm(learned - target) / np.linalg.norm(target)
        assert found["overall_matrix"].item() == pytest.approx(difference)
        log = abs(ours["log_condition_number"] - theirs["log_condition_number"])
        assert found["log_condition_number"].item() == pytest.approx(log, rel=1e-8)

    def test_a_perfect_copy_has_no_error(self, random) -> None:
        stack = torch.randn(4, 5, 5, generator=random)
        for name, error in errors(stack, stack).items():
            assert (error == 0).all(), name

    @given(factor=st.sampled_from([0.5, 2.0, 8.0]))
    def test_scaling_moves_norms_and_leaves_shape_alone(self, factor) -> None:
        target = torch.randn(5, 5, generator=torch.Generator().manual_seed(3))
        found = errors(factor * target, target)
        for name in ("row_norms", "column_norms", "singular_values", "frobenius_norm"):
            assert found[name].item() == pytest.approx(abs(factor - 1)), name
        for name in ("condition_number", "effective_rank", "spectral_gap"):
            assert found[name].item() == pytest.approx(0, abs=1e-12), name

    def test_an_infinite_target_kappa_makes_the_error_absent_with_a_reason(self, random) -> None:
        low_rank = torch.randn(6, 2, generator=random) @ torch.randn(2, 6, generator=random)
        target = torch.stack([low_rank.double(), torch.eye(6).double()])
        found = errors(torch.randn(2, 6, 6, generator=random), target)
        # float32 rounding of the product leaves it regular: make it exactly singular
        target[0, 5] = target[0, 4]
        found = errors(torch.randn(2, 6, 6, generator=random), target)
        for name in ("condition_number", "log_condition_number"):
            assert found[name][0].isnan() and found[name][1].isfinite()
            assert found.absent[name] == "the target's condition_number is infinite (1 of 2)"
        assert found["row_norms"].isfinite().all()

    def test_a_zero_target_gap_makes_its_error_absent(self) -> None:
        found = errors(torch.diag(torch.tensor([2.0, 1.0])), torch.eye(2))
        assert found["spectral_gap"].isnan()
        assert found.absent == {"spectral_gap": "the target's spectral_gap is zero (1 of 1)"}

    def test_a_learned_matrix_that_is_not_finite_has_no_error(self) -> None:
        found = errors(torch.full((2, 2), torch.nan), torch.diag(torch.tensor([2.0, 1.0])))
        assert all(error.isnan() for error in found.values())
        assert set(found.absent) == set(found)

    @pytest.mark.parametrize("other", [(3, 2), (5, 2, 3)])
    def test_different_shapes_are_refused(self, other) -> None:
        with pytest.raises(ValueError, match="one shape"):
            errors(torch.ones(2, 2, 3), torch.ones(other))

    def test_every_reason_is_given_with_its_own_count(self, random) -> None:
        learned = torch.randn(4, 5, 5, generator=random)
        target = learned.clone()
        target[0], target[1], learned[2] = torch.nan, 1.0, 1.0
        assert errors(learned, target).absent["condition_number"] == (
            "a matrix is not finite (1 of 4); the target's condition_number is infinite (1 of 4); "
            "the learned condition_number is infinite (1 of 4)"
        )
        assert errors(learned, target).absent["row_norms"] == "a matrix is not finite (1 of 4)"

    def test_one_target_serves_a_stack_of_learned_matrices(self, random) -> None:
        found = errors(torch.randn(4, 3, 3, generator=random), torch.eye(3) + 0.1)
        assert found["overall_matrix"].shape == found["condition_number"].shape == (4,)


def test_numpy_arrays_of_any_kind_are_taken() -> None:
    given = np.random.default_rng(0).standard_normal((6, 5))
    fixed = given.copy()
    fixed.flags.writeable = False
    expected = Components(torch.from_numpy(given)).singular_values
    for array in (given, given[::-1], given[:, ::-1], fixed, given.astype(">f8"), given.tolist()):
        torch.testing.assert_close(Components(array).singular_values, expected)


@pytest.mark.parametrize("threshold", [-1.0, 1.0, math.nan])
def test_a_threshold_that_is_no_share_is_refused(threshold) -> None:
    with pytest.raises(ValueError, match=r"expected a threshold in \[0, 1\)"):
        Components(torch.eye(2), threshold)


def test_rounding_never_counts_towards_the_rank() -> None:
    ones = torch.ones(40, 40)
    assert Components(ones, threshold=0.0).effective_rank == 1
    assert spectra.vitals(ones, threshold=0.0).effective_rank == 1


def test_reasons_tell_zero_undefined_and_not_finite_apart() -> None:
    eye, zero = torch.eye(3), torch.zeros(3, 3)
    absent = errors(eye, zero).absent
    assert absent["frobenius_norm"] == "the target's frobenius_norm is zero (1 of 1)"
    assert absent["spectral_gap"] == "the target's spectral_gap is undefined (1 of 1)"
    assert errors(zero, eye).absent["spectral_gap"].startswith("the learned spectral_gap is undef")
    assert errors(eye / 0, eye).absent["row_norms"] == "a matrix is not finite (1 of 1)"


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0), (2, 0, 3)])
def test_errors_of_empty_matrices_are_absent(shape) -> None:
    found = errors(torch.zeros(shape), torch.zeros(shape))
    assert set(found) == set(found.absent)
    assert all(value.isnan().all() and value.shape == shape[:-2] for value in found.values())


def test_rows_tiny_beside_others_have_norms_of_their_own() -> None:
    matrix = torch.tensor([[1e200, 1e200], [3e-200, -4e-200]], dtype=torch.float64)
    rows = torch.tensor([2**0.5 * 1e200, 5e-200], dtype=torch.float64)
    torch.testing.assert_close(Components(matrix).row_norms, rows, rtol=1e-14, atol=0)
    torch.testing.assert_close(Components(matrix.mT).column_norms, rows, rtol=1e-14, atol=0)
    stack = torch.stack([matrix, torch.eye(2).double()])
    torch.testing.assert_close(Components(stack).row_norms[0], rows, rtol=1e-14, atol=0)


@pytest.mark.parametrize("scale", [2.0**-1074, 2.0**1021])
def test_ratios_are_right_at_the_ends_of_float64(scale) -> None:
    matrix = torch.tensor([[4.0, 1.0], [1.0, 3.0]], dtype=torch.float64)
    found, plain = Components(matrix * scale), Components(matrix)
    for name in ("condition_number", "spectral_gap", "effective_rank", "stable_rank"):
        torch.testing.assert_close(getattr(found, name), getattr(plain, name))


def test_an_error_outside_the_range_says_so() -> None:
    huge = torch.full((2, 2), 1.2e308, dtype=torch.float64).fill_diagonal_(0.5e308)
    assert "outside float64's range" in errors(-huge, huge).absent["overall_matrix"]


def test_a_notebook_shows_every_component_once_with_its_number() -> None:
    matrix = torch.diag(torch.tensor([4.0, 2.0, 1.0]))
    shown = Components(matrix)._repr_html_()
    assert all(f"<th>{name.replace('_', ' ')}</th>" in shown for name in Components.names)
    assert "<th>condition number</th><td>4.000</td>" in shown
    broken = Components(torch.full((2, 2), torch.nan))._repr_html_()
    assert "undefined" in broken
