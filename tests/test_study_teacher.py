"""The teacher study: networks that are the same are found to be, and nothing else is an error."""

from itertools import pairwise, permutations, product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kappascope.bookmarks import Bookmark
from kappascope.lab import verdicts
from kappascope.statistics import Table
from kappascope.studies import teacher_model
from kappascope.studies.teacher import STUDY, trials
from kappascope.studies.teacher_claims import LEVELS, tuned
from kappascope.studies.teacher_model import (
    ARCHITECTURES,
    KAPPA,
    OUTER,
    WIDTH,
    Architecture,
    Network,
    optimizers,
    student,
    teacher,
)
from kappascope.studies.teacher_symmetry import (
    agreement,
    canonical,
    gauge,
    groups_of,
    matched,
    permuted,
    recovery,
    rescaled,
)
from kappascope.tasks import generator

SETTING = {
    "stage": "compare", "start": "near", "depth": 2, "activation": "relu", "variant": "plain",
    "optimizer": "adam", "learning_rate": 0.03, "steps": 150,
}  # fmt: skip
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


class TestNetworks:
    @architectures
    def test_every_matrix_of_a_teacher_has_the_kappa_it_should(self, architecture):
        for matrix in made(architecture).matrices:
            s = torch.linalg.matrix_norm(matrix[:, :-1], 2) / torch.linalg.matrix_norm(
                matrix[:, :-1], -2
            )
            assert s.item() == pytest.approx(KAPPA, rel=1e-4)

    @architectures
    def test_a_near_student_is_as_far_off_as_stated(self, architecture):
        master = teacher(architecture, generator("near"))
        near = student(master, "near", generator("start"))
        for a, b in zip(near.linear, master.linear, strict=True):
            off = (a.weight - b.weight).norm() / b.weight.norm()
            assert off.item() == pytest.approx(teacher_model.NEAR, rel=0.3)

    def test_muon_has_the_matrices_and_adam_the_biases(self):
        parts = optimizers("muon", Network(ARCHITECTURES[0]), 0.1)
        ranks = {
            name: {p.ndim for p in part.param_groups[0]["params"]} for name, part in parts.items()
        }
        assert ranks == {"muon": {2}, "biases": {1}}


def kept(seed: int, bookmark: Bookmark, **changes: object) -> list[dict]:
    rows = trials(seed, bookmark, **{**SETTING, **changes})
    return [{k: v.tolist() if k == "values" else v for k, v in row.items()} for row in rows]


class KilledError(Exception):
    """What happens to a process."""


class TestTrials:
    @pytest.mark.parametrize("optimizer", ["sgd", "adam", "muon"])
    def test_a_killed_trial_ends_as_if_nothing_had_happened(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
    ):
        whole = kept(0, Bookmark(), optimizer=optimizer, steps=40)
        calls, forward = [], Network.forward

        def mortal(self: Network, x: torch.Tensor) -> torch.Tensor:
            calls.append(x)
            if len(calls) == 60:  # in the middle of a step, after some twenty
                raise KilledError
            return forward(self, x)

        bookmark = Bookmark(tmp_path / "trial", every=0.0)
        with monkeypatch.context() as patch, pytest.raises(KilledError):
            patch.setattr(Network, "forward", mortal)
            kept(0, bookmark, optimizer=optimizer, steps=40)
        assert (tmp_path / "trial").exists()
        assert kept(0, Bookmark(tmp_path / "trial"), optimizer=optimizer, steps=40) == whole

    def test_levels_are_looked_at_in_order_and_once(self):
        rows = kept(1, Bookmark())
        steps = {r["level"]: r["value"] for r in rows if r.get("component") == "steps"}
        assert list(steps) == list(LEVELS[: len(steps)])
        assert sorted(steps.values()) == list(steps.values())
        losses = {r["level"]: r["value"] for r in rows if r.get("component") == "loss"}
        assert all(0.5 * level < losses[level] < level for level in steps)

    def test_gauge_dependent_components_have_no_rows(self):
        rows = [r for r in kept(0, Bookmark()) if r.get("matrix") == "first"]
        assert not {"row_norms", "frobenius_norm"} & {r.get("component") for r in rows}

    def test_a_student_that_diverges_says_so(self):
        rows = kept(0, Bookmark(), optimizer="sgd", learning_rate=1e6)
        [distance] = [r["value"] for r in rows if r.get("component") == "distance"]
        assert distance == float("inf")

    def test_optimizers_share_teacher_start_and_data(self, monkeypatch: pytest.MonkeyPatch):
        seen: dict[str, list[torch.Tensor]] = {"sgd": [], "adam": [], "muon": []}
        forward = Network.forward
        for name, inputs in seen.items():
            with monkeypatch.context() as patch:
                patch.setattr(
                    Network,
                    "forward",
                    lambda self, x, kept=inputs: (kept.append(x), forward(self, x))[1],
                )
                kept(0, Bookmark(), optimizer=name, steps=3)
        for a, b in (("sgd", "adam"), ("adam", "muon")):
            assert all(torch.equal(x, y) for x, y in zip(seen[a], seen[b], strict=True))


def row(rate: float, component: str, level: float, value: float) -> dict:
    names = {**SETTING, "stage": "tune", "learning_rate": rate, "seed": 0, "matrix": "all"}
    return {**names, "component": component, "level": level, "value": value}


class TestTuning:
    def test_more_levels_beat_fewer_then_fewer_steps(self):
        rows = [
            row(0.1, "steps", 0.1, 10.0),
            row(0.3, "steps", 0.1, 50.0), row(0.3, "steps", 0.01, 90.0),
            row(1.0, "steps", 0.1, 50.0), row(1.0, "steps", 0.01, 80.0),
            *(row(rate, "loss", 0.0, 0.5) for rate in (0.1, 0.3, 1.0)),
        ]  # fmt: skip
        [setting] = tuned(Table.of(rows))
        assert setting == {**SETTING, "learning_rate": 1.0}

    def test_where_nobody_arrives_the_lowest_loss_wins(self):
        rows = [row(rate, "loss", 0.0, loss) for rate, loss in ((0.1, 0.4), (0.3, 0.2))]
        [setting] = tuned(Table.of([*rows, row(1.0, "loss", 0.0, float("nan"))]))
        assert setting["learning_rate"] == 0.3


class TestThePage:
    def test_claims_exhibits_and_figure_are_made_of_its_rows(self):
        """Two seeds: too few for a verdict, enough for every sentence and table."""
        kinds = [
            ("fresh", ARCHITECTURES[0]),
            ("near", ARCHITECTURES[0]),
            ("near", ARCHITECTURES[6]),
        ]
        rows = []
        for start, one in kinds:
            names = {"depth": one.depth, "activation": one.activation, "variant": one.variant}
            for optimizer, seed in product(("sgd", "adam", "muon"), range(2)):
                setting = {**SETTING, **names, "start": start, "optimizer": optimizer, "steps": 60}
                found = trials(seed, Bookmark(), **setting)
                rows += [{"seed": seed, **setting, **r} for r in found if "which" not in r]
        rows = Table.of([{"experiment": "teacher", "stream": "own", **r} for r in rows])
        claims = verdicts([STUDY], rows)["claims"]
        assert len(claims) == len(STUDY.claims)
        tables = list(STUDY.exhibits(rows))
        assert all(len(line) == len(t.columns) for t in tables for line in t.rows)
        assert any("gauge: " in cell for t in tables for line in t.rows for cell in line)
        assert len(STUDY.plot(rows, Table.of([])).axes) == 6
