"""Networks that are the same are found to be, and nothing else is an error."""

from itertools import pairwise, permutations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kappascope.lab.tasks import generator
from kappascope.studies.teacher.model import (
    ARCHITECTURES,
    OUTER,
    WIDTH,
    Architecture,
    Network,
    teacher,
)
from kappascope.studies.teacher.symmetry import (
    agreement,
    canonical,
    gauge,
    groups_of,
    matched,
    permuted,
    recovery,
    rescaled,
)

architectures = pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)


def made(architecture: Architecture, seed: int = 0) -> Network:
    return teacher(architecture, generator("test", seed)).double()


def with_matrices(architecture: Architecture, matrices: tuple[torch.Tensor, ...]) -> Network:
    network = Network(architecture).double()
    with torch.no_grad():
        for layer, matrix in zip(network.linear, matrices, strict=True):
            layer.weight.copy_(matrix[:, :-1])
            layer.bias.copy_(matrix[:, -1])
    return network.requires_grad_(False)


def disguised(architecture: Architecture, matrices: tuple[torch.Tensor, ...], seed: int):
    """Another network with the same function, by every symmetry the architecture has."""
    random, groups = generator("disguise", seed), groups_of(architecture)
    orders = {group: torch.randperm(WIDTH, generator=random) for group in groups}
    if architecture.variant == "layernorm":
        shift = torch.randn(OUTER + 1, generator=random).double()
        hidden = (3.0 * w + shift[: w.shape[1]] for w in matrices[:-1])
        matrices = (*hidden, matrices[-1])
    elif architecture.activation == "relu":
        scales = {g: torch.rand(WIDTH, generator=random).double() * 9 + 0.1 for g in groups}
        matrices = rescaled(architecture, matrices, scales)
    return permuted(architecture, matrices, orders)


class TestEveryArchitecture:
    @architectures
    @settings(max_examples=8)
    @given(seed=st.integers(0, 10**6))
    def test_a_disguise_keeps_the_function_and_is_seen_through(self, architecture, seed):
        network = made(architecture, seed % 7)
        other = with_matrices(architecture, disguised(architecture, network.matrices, seed))
        x = torch.randn(50, OUTER, generator=generator("x", seed)).double()
        torch.testing.assert_close(other(x), network(x), rtol=1e-9, atol=1e-9)
        found = recovery(architecture, other.matrices, network.matrices)
        assert max(found.values()) < 1e-10

    @architectures
    def test_a_small_change_is_an_error_of_its_own_size(self, architecture):
        target = made(architecture).matrices
        moved = tuple(w + 1e-4 * torch.randn(w.shape, generator=generator("m")) for w in target)
        learned = disguised(architecture, moved, 5)
        plain = recovery(architecture, moved, target)
        assert recovery(architecture, learned, target) == pytest.approx(plain, rel=1e-6, abs=1e-10)
        assert all(1e-6 < plain[name, "overall_matrix"] < 1e-2 for name in architecture.matrices)

    @architectures
    def test_what_is_gauge_is_constant_and_what_is_printed_is_not(self, architecture):
        seen = [canonical(architecture, made(architecture, seed).matrices) for seed in (0, 1)]
        for place, name in enumerate(architecture.matrices):
            a, b = (one[place][:, :-1] for one in seen)
            norms = {"row_norms": (a.norm(dim=1), b.norm(dim=1))}
            norms["frobenius_norm"] = (a.norm(), b.norm())
            alike = {key for key, (x, y) in norms.items() if torch.allclose(x, y)}
            fixed = set(gauge(architecture, name))
            raw = name == "last" or architecture.activation == "gelu"
            by_design = {"frobenius_norm"} if raw else set()  # every teacher has He's scale
            assert alike - by_design == fixed - by_design

    @architectures
    def test_canonical_twice_is_canonical(self, architecture):
        once = canonical(architecture, made(architecture).matrices)
        for a, b in zip(once, canonical(architecture, once), strict=True):
            torch.testing.assert_close(a, b)


class TestMatching:
    @pytest.mark.parametrize("seed", range(12))
    @pytest.mark.parametrize("kind", [(2, "plain"), (3, "plain"), (3, "residual")], ids=str)
    def test_no_order_of_few_units_is_better(self, kind, seed):
        """All orders, tried: exact for one group; for noisy students of more layers as well."""
        architecture = Architecture(kind[0], "gelu", kind[1])
        random, n = generator("few", seed), 4
        widths = (5, *(n,) * (architecture.depth - 1), 3)
        target = tuple(
            torch.randn(b, a + 1, generator=random).double() for a, b in pairwise(widths)
        )
        noise = 3.0 if architecture.depth == 2 else 0.5
        noisy = tuple(w + noise * torch.randn(w.shape, generator=random) for w in target)
        groups = groups_of(architecture)
        learned = permuted(architecture, noisy, {g: torch.arange(n).roll(1) for g in groups})
        weighed = tuple(t / t.square().sum() for t in target)
        orders = [torch.tensor(order) for order in permutations(range(n))]
        best = max(
            agreement(architecture, learned, weighed, dict(zip(groups, choice, strict=True)))
            for choice in product(orders, repeat=len(groups))
        )
        reached = agreement(architecture, matched(architecture, learned, target), weighed, {})
        assert reached == pytest.approx(best, rel=1e-12)

    def test_a_residual_ties_what_a_plain_network_may_permute_alone(self):
        architecture = Architecture(3, "gelu", "residual")
        network = made(architecture)
        free = {0: torch.arange(WIDTH).roll(1), 1: torch.arange(WIDTH).roll(2)}
        apart = permuted(Architecture(3, "gelu", "plain"), network.matrices, free)
        found = recovery(architecture, apart, network.matrices)
        assert found["middle", "overall_matrix"] > 0.1

    def test_gelu_units_cannot_be_rescaled(self):
        architecture = Architecture(2, "gelu", "plain")
        target = made(architecture).matrices
        scaled = rescaled(architecture, target, {0: torch.full((WIDTH,), 2.0).double()})
        found = recovery(architecture, scaled, target)
        assert found["first", "frobenius_norm"] == pytest.approx(1)
