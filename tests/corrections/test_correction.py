"""Every correction keeps the contract: it attaches in one line and goes without a trace."""

from __future__ import annotations

import copy
import io
import pickle
import runpy
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from correction_examples import (
    EXAMPLES,
    FOR_ATTENTION,
    MADE,
    MERGED,
    MODELS,
    PENALTIES,
    Attentive,
    answers,
    every,
    inputs,
    matrices,
    named,
    perceptron,
    steps,
    steps_on,
)
from kappascope.corrections import (
    Correction,
    MagnitudeDirection,
    Multipliers,
    NormPin,
    OrthogonalPenalty,
    PaperPenalty,
    SpectralDecay,
    SpectralNormalization,
    SpectralPenalty,
    SVDCorrection,
)
from kappascope.lab.tasks import Paper, Regression, heterogeneous, start
from kappascope.lab.training import Matrix, last, train
from kappascope.matrix.components import Components, errors
from kappascope.refusal import Refusal


def adam(model: nn.Module) -> AdamW:
    """Its usual eps is zero in float16."""
    return AdamW(model.parameters(), lr=0.05, eps=1e-4)


def test_every_correction_has_an_example() -> None:
    assert {type(e) for e in (*EXAMPLES, *FOR_ATTENTION)} == set(Correction.__subclasses__())


@pytest.mark.parametrize("kind", Correction.__subclasses__(), ids=lambda kind: kind.__name__)
def test_every_correction_is_usable_with_its_defaults(kind: type[Correction]) -> None:
    if any(isinstance(example, kind) for example in FOR_ATTENTION):
        model, weights = Attentive(), ("attention.in_proj_weight",)
    else:
        model, weights = perceptron(), ("0.weight", "2.weight")
    optimizer = AdamW(model.parameters())
    with kind().attach(model, optimizer) as handle:
        steps(model, optimizer, 3)
    assert handle.weights == weights and not handle.refused


@every
@pytest.mark.parametrize("shape", MODELS)
class TestEveryCorrection:
    """What holds for each correction, the next one included."""

    @pytest.fixture
    def model(self, correction: Correction, shape: str) -> nn.Module:
        torch.manual_seed(0)
        if shape == "recurrent" and isinstance(correction, MERGED):
            pytest.skip("recurrent layers keep references to their weights: refused with that")
        return MODELS[shape]()

    @pytest.fixture
    def optimizer(self, model: nn.Module) -> Optimizer:
        return adam(model)

    def test_attaching_changes_no_output(self, correction, model, optimizer) -> None:
        before = answers(model)
        with correction.attach(model, optimizer):
            assert torch.equal(answers(model), before)

    def test_attaching_moves_no_tensor_and_draws_no_number(
        self, correction, model, optimizer
    ) -> None:
        before, stream = copy.deepcopy(model.state_dict()), torch.get_rng_state()
        correction.attach(model, optimizer).close()
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
        assert torch.equal(torch.get_rng_state(), stream)

    def test_closing_leaves_the_trained_function(self, correction, model, optimizer) -> None:
        with correction.attach(model, optimizer) as handle:
            steps(model, optimizer, 4)
            trained = answers(model)
        assert torch.equal(answers(model), trained)
        assert handle.difference == 0.0

    def test_closing_leaves_the_model_and_the_optimizer_as_they_were(
        self, correction, model, optimizer
    ) -> None:
        before, kinds = named(model), [type(m) for m in model.modules()]
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        with correction.attach(model, optimizer):
            steps(model, optimizer, 2)
        assert named(model) == before
        assert [type(m) for m in model.modules()] == kinds
        assert set(optimizer.state) <= set(model.parameters())
        after = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        assert after == groups
        assert [id(p) for g in optimizer.param_groups for p in g["params"]] == [
            i for _, i in before
        ]
        assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks

    def test_after_closing_training_is_as_without_it(self, correction, model, optimizer) -> None:
        correction.attach(model, optimizer).close()
        twin = copy.deepcopy(model)
        steps(model, optimizer)
        steps(twin, adam(twin))
        torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=0)

    def test_attaching_twice_is_an_error(self, correction, model, optimizer) -> None:
        with correction.attach(model, optimizer) as handle:
            before = named(model)
            with pytest.raises(ValueError):
                correction.attach(model, optimizer, where=handle.weights)
            assert named(model) == before

    def test_frozen_and_made_weights_are_left_out_with_a_reason(
        self, correction, model, optimizer, shape
    ) -> None:
        with correction.attach(model, optimizer) as handle:
            assert all(handle.left_out.values())
        if shape == "language model":
            assert {"token.weight"} <= set(handle.left_out) <= {"token.weight", "lm_head.weight"}
            return
        if shape == "batch norm":  # which undoes one factor of the matrix before it
            assert set(handle.left_out) <= {"0.weight"}
            return
        left = {"frozen": {"0.weight"}, "tied": {"token.weight"}}.get(shape, set())
        made, invertible = MADE.get(shape, (set(), True))
        if isinstance(correction, MERGED) or not (invertible or isinstance(correction, PENALTIES)):
            left = left | made
        assert set(handle.left_out) == left

    def test_it_goes_on_from_a_checkpoint_to_the_bit(
        self, correction, model, optimizer, shape
    ) -> None:
        handle = correction.attach(model, optimizer)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        steps(model, optimizer, 3)
        scheduler.step()
        file = io.BytesIO()
        parts = {"m": model, "o": optimizer, "s": scheduler, "h": handle}
        torch.save({key: part.state_dict() for key, part in parts.items()}, file)
        steps(model, optimizer, 4)

        torch.manual_seed(5)
        other = MODELS[shape]()
        fresh = adam(other)
        again = {"m": other, "o": fresh, "h": correction.attach(other, fresh)}
        again["s"] = torch.optim.lr_scheduler.ExponentialLR(fresh, 0.9)
        file.seek(0)
        for key, state in torch.load(file, weights_only=True).items():
            again[key].load_state_dict(state)
        steps(other, fresh, 4)
        torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)

    def test_the_state_dict_is_that_of_the_plain_model(
        self, correction, model, optimizer, shape
    ) -> None:
        torch.manual_seed(3)
        plain = MODELS[shape]()
        with correction.attach(model, optimizer):
            steps(model, optimizer, 2)
            assert list(model.state_dict()) == list(plain.state_dict())
            plain.load_state_dict(model.state_dict())
            assert torch.equal(answers(plain), answers(model))
            if shape not in MADE:  # torch pickles no parametrized module
                assert torch.equal(answers(pickle.loads(pickle.dumps(model))), answers(model))

    def test_a_plain_state_dict_loads_before_or_after_attaching(
        self, correction, model, optimizer, shape
    ) -> None:
        torch.manual_seed(3)
        other = MODELS[shape]()
        start = copy.deepcopy(other.state_dict())
        late = adam(other)
        first, second = correction.attach(model, optimizer), correction.attach(other, late)
        steps(other, late, 2)  # it has factors of its own
        for handle, one in ((first, model), (second, other)):
            one.load_state_dict(start)
            if handle.factor_optimizers:
                late.load_state_dict(adam(other).state_dict())
                steps(one, optimizer if one is model else late, 3)
                assert all(torch.isfinite(v).all() for v in one.state_dict().values())
        holds_what_was = isinstance(correction, MagnitudeDirection | SpectralNormalization)
        if handle.factor_optimizers and not holds_what_was:  # when it was attached
            torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)

    def test_a_copy_is_independent(self, correction, model, optimizer) -> None:
        with correction.attach(model, optimizer):
            steps(model, optimizer)
            twin = copy.deepcopy(model)
            before = answers(twin)
            assert torch.equal(before, answers(model))
            steps(model, optimizer)
            assert torch.equal(answers(twin), before)
            assert not torch.equal(answers(model), before)


@every
def test_maximizing_the_negative_is_minimizing(correction) -> None:
    torch.manual_seed(0)
    falling, rising = perceptron(), perceptron()
    rising.load_state_dict(falling.state_dict())
    down, up = SGD(falling.parameters(), 0.05), SGD(rising.parameters(), 0.05, maximize=True)
    with correction.attach(falling, down), correction.attach(rising, up):
        for _ in range(5):
            steps(falling, down)
            up.zero_grad()
            (-rising(inputs(rising)).square().mean()).backward()
            up.step()
    torch.testing.assert_close(rising.state_dict(), falling.state_dict())


def test_what_cannot_be_attached_to_is_an_error_in_one_line() -> None:
    model = perceptron()
    optimizer = SGD(model.parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    for wrong, came in (
        (None, "NoneType"),
        (scheduler, "ConstantLR"),
        (model.parameters(), "generator"),
        ([], "list of nothing"),
        ([optimizer, scheduler], "list of SGD, ConstantLR"),
        ({"a": optimizer}, "dict"),
    ):
        with pytest.raises(TypeError, match=f"expected an optimizer or a list of some; got {came}"):
            NormPin().attach(model, wrong)
    with pytest.raises(TypeError, match="expected a module to correct; got OrderedDict"):
        NormPin().attach(model.state_dict(), optimizer)
    for where in (5, [5], b"0.weight", model[0], model[0].weight):
        with pytest.raises(TypeError, match="expected where= to be a name or pattern"):
            NormPin().attach(model, optimizer, where=where)


@every
def test_a_weight_that_is_not_finite_is_an_error_that_names_it(correction) -> None:
    model = perceptron()
    model[2].weight.data[0, 0] = torch.nan
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"^2\.weight has entries that are not finite; repair it"):
        correction.attach(model, optimizer)
    correction.attach(model, optimizer, exclude="2.*").close()
    assert not optimizer._optimizer_step_pre_hooks


def test_an_optimizer_that_runs_no_hooks_is_an_error_in_one_line() -> None:
    class Lookahead(Optimizer):
        """One around another, as some are written: without a start of its own."""

        def __init__(self, inner: Optimizer) -> None:
            self.optimizer, self.param_groups = inner, inner.param_groups

    model = perceptron()
    with pytest.raises(TypeError, match=r"Lookahead runs no hooks, .*; attach to the optimizer"):
        NormPin().attach(model, Lookahead(SGD(model.parameters(), lr=0.1)))


WRONG = {
    "every": (0, -1, 1.5, None),
    "kappa": (0.5, float("nan"), float("inf"), None),
    "norm": (-1.0, 0.0, float("nan")),
    "target": (0.5, float("nan"), float("inf")),
    "part": (0, None, slice(None, None, -1), slice(None, None, 0), slice(0.5), slice("a")),
    "clip": (0.0, -1.0, float("nan")),
    "tau": (0.0, -1.0, float("nan")),
    "cap": (0.0, -1.0, float("nan")),
    "low": (-1.0, float("nan"), None),
    "high": (0.0, 0.1, float("nan"), None),
    "heads": (0, 1.5, -1),
    "measured": (3, "logits"),
    "pin": (0.1, Multipliers()),
    "multipliers": (0.1, SpectralPenalty()),
    "penalties": (0.1, Multipliers()),
    **dict.fromkeys(
        ("strength", "rate", "step", "weight_decay", "band", "slack"), (-1.0, "1", None)
    ),
}


@pytest.mark.parametrize("kind", Correction.__subclasses__(), ids=lambda kind: kind.__name__)
def test_an_argument_that_makes_no_sense_is_an_error_at_once(kind: type[Correction]) -> None:
    switches = {"rows", "columns", "gauge", "spectral", "by_shape", "soft"}
    for name in set(vars(kind())) - switches:
        for value in WRONG[name]:
            with pytest.raises(ValueError, match=f"{kind.__name__} expected {name} to be "):
                kind(**{name: value})


@every
def test_a_correction_is_a_value(correction) -> None:
    assert hash(correction) == hash(copy.deepcopy(correction))
    assert correction == copy.deepcopy(correction)


def pure(correction: Correction, weight: Tensor) -> list[Tensor]:
    forms = [getattr(correction, name, None) for name in ("penalty", "corrected")]
    return [form(weight) for form in forms if form is not None]


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pure_forms_of_half_precision_are_those_of_single_rounded(correction, dtype) -> None:
    weight = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    for half, single in zip(
        pure(correction, weight), pure(correction, weight.float()), strict=True
    ):
        assert half.dtype == dtype and torch.equal(half, single.to(dtype))


@every
def test_autocast_changes_no_pure_form(correction) -> None:
    weight = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    expected = pure(correction, weight)
    with torch.autocast("cpu", torch.float16):
        found = pure(correction, weight)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


EDGES: dict[str, Tensor] = {
    "zero": torch.zeros(3, 3),
    "identity": torch.eye(3),
    "orthogonal": torch.linalg.qr(matrices(4, 3).float())[0],
    "rank 1": torch.outer(torch.arange(1.0, 4.0), torch.ones(4)),
    "equal pairs": torch.diag(torch.tensor([2.0, 2.0, 1.0, 1.0])),
    "1x1": torch.tensor([[2.0]]),
    "1xn": torch.arange(1.0, 5.0)[None],
    "tiny": 1e-20 * matrices(3, 3).float(),
}


@pytest.mark.parametrize(
    "correction",
    [*EXAMPLES, SpectralPenalty(1.0, lambda w: w.diagonal().sort(descending=True)[0] + 5, 0)],
    ids=lambda correction: f"{type(correction).__name__} {getattr(correction, 'strength', '')}",
)
@pytest.mark.parametrize("edge", EDGES)
def test_degenerate_weights_stay_finite(correction, edge) -> None:
    weight = EDGES[edge].clone()
    if hasattr(correction, "penalty"):
        leaf = weight.clone().requires_grad_()
        value = correction.penalty(leaf)
        value.backward()
        assert value.isfinite() and leaf.grad.isfinite().all()
    if hasattr(correction, "corrected"):
        assert correction.corrected(weight).isfinite().all()
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.weight.data = weight
    optimizer = AdamW(layer.parameters(), lr=0.01)
    x = torch.randn(8, weight.shape[1], generator=torch.Generator().manual_seed(0))
    try:
        handle = correction.attach(layer, optimizer)
    except Refusal as refusal:
        assert edge == "zero" and "zero at first" in str(refusal)
        return
    with handle:
        steps_on(layer, optimizer, x, 100)
    assert layer.weight.isfinite().all() and not handle.refused


@pytest.mark.parametrize("correction", [SpectralPenalty(0.0), SVDCorrection(step=0.0)])
@pytest.mark.parametrize("more", [OrthogonalPenalty(0.0), SpectralDecay(0.0)])
def test_strength_zero_is_an_exact_no_op(correction, more) -> None:
    torch.manual_seed(0)
    model = perceptron()
    twin = copy.deepcopy(model)
    optimizer, other = (AdamW(m.parameters(), lr=0.05) for m in (model, twin))
    with correction.attach(model, optimizer), more.attach(model, optimizer):
        steps(model, optimizer, 5)
    steps(twin, other, 5)
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=0)


@pytest.fixture(scope="module")
def fourth() -> dict[str, dict[str, Tensor]]:
    """Errors by strategy, of the paper's ten trials."""
    streams = Paper(range(10))
    target, random = heterogeneous(streams.random(), 64), streams.random(7)
    origin, known = start(random, 64), Components(target).singular_values
    arms = {
        "standard": None,
        "multipliers": Multipliers(rate=0.1, weight_decay=0.0),
        "spectral": PaperPenalty(0.005, target=lambda _: known),
        "svd": SVDCorrection(every=20, step=0.1, target=lambda _: known),
    }
    batches = list(islice(Regression(target).batches(random), 200))
    found = {}
    for name, correction in arms.items():
        model = Matrix(origin)
        optimizer = SGD(model.parameters(), lr=0.01)
        handle = correction and correction.attach(model, optimizer)
        step = last(train(model, optimizer, batches))
        if handle:
            handle.close()
        found[name] = {k: v.mean() for k, v in errors(step.weight, target).items()}
    return found


def test_the_papers_multipliers_are_reproduced(fourth) -> None:
    assert f"{fourth['standard']['row_norms']:.3f}" == "0.134"
    assert f"{fourth['standard']['condition_number']:.2f}" == "1.23"
    assert f"{fourth['multipliers']['row_norms']:.4f}" == "0.0443"
    assert f"{fourth['multipliers']['condition_number']:.3f}" == "1.108"


def test_the_papers_spectral_penalty_is_reproduced(fourth) -> None:
    assert f"{fourth['spectral']['condition_number']:.2f}" == "0.29"
    assert f"{fourth['spectral']['row_norms']:.4f}" == "0.1337"


def test_the_papers_svd_correction_is_reproduced(fourth) -> None:
    gains = {key: 1 - fourth["svd"][key] / fourth["standard"][key] for key in fourth["svd"]}
    assert 100 * gains["row_norms"] == pytest.approx(64.2, abs=0.06)
    assert 100 * gains["condition_number"] == pytest.approx(32.2, abs=0.06)


SCRIPTS = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # Lightning's use of torch
@pytest.mark.parametrize("example", SCRIPTS, ids=lambda path: path.stem)
def test_the_examples_run(example, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # where they may leave what they write
    assert runpy.run_path(str(example))["__file__"] == str(example)


@every
def test_a_model_on_the_meta_device_is_refused(correction) -> None:
    model = perceptron().to("meta")
    before = named(model)
    with pytest.raises(Refusal, match=r"4 of 4 parameters are on the meta device.*load the"):
        correction.attach(model, SGD(model.parameters(), lr=0.1))
    assert named(model) == before


STRESS = Path(__file__).parents[2] / "benchmarks" / "stress.py"


@pytest.mark.parametrize("seed", range(4))
def test_no_combination_of_model_optimizer_and_loop_fails(seed, capsys) -> None:
    counts, reasons = runpy.run_path(str(STRESS))["stressed"](40, seed)
    assert not counts["failed"], capsys.readouterr().out
    assert counts["exact"] > 20 and sum(counts.values()) == 40
    assert sum(reasons.values()) == counts["explained"]
