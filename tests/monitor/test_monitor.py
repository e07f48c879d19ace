"""The monitor around training: nothing of it is seen by the model, and everything by the record."""

import copy
import gc
import itertools
import math
import os
import statistics
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from kappascope import Monitor, corrections
from kappascope.monitor import monitor as module
from kappascope.monitor import source
from kappascope.monitor.overview import standings
from kappascope.monitor.record import Alert, Run
from kappascope.refusal import Refusal
from monitored_training import (
    batches,
    loss_of,
    odd_model,
    same,
    state,
    texts,
    train,
    transformer,
)

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "Adam": lambda p: Adam(p, lr=1e-3),
    "AdamW": lambda p: AdamW(p, lr=1e-3, weight_decay=0.1),
    "AdamW fused": lambda p: AdamW(p, lr=1e-3, fused=True),
    "Adam, amsgrad, one by one": lambda p: Adam(p, lr=1e-3, amsgrad=True, foreach=False),
}


def monitored(folder: Path, **options: Any) -> Monitor:
    """A monitor that hides no error of its own."""
    return Monitor(folder, **({"every": 3, "spectra_every": 6, "strict": True} | options))


class TestTrainingIsBitIdentical:
    @pytest.mark.parametrize("kind", OPTIMIZERS)
    @pytest.mark.parametrize("make", [transformer, odd_model])
    def test_with_and_without(
        self, make: Callable[[], nn.Module], kind: str, tmp_path: Path
    ) -> None:
        found = []
        for folder in (None, tmp_path):
            torch.manual_seed(0)
            model = make()
            optimizer = OPTIMIZERS[kind](p for p in model.parameters() if p.requires_grad)
            data = texts(9) if make is transformer else batches(9)
            if folder is None:
                train(model, optimizer, data)
            else:
                with monitored(folder, norms_every=1).attach(model, optimizer) as monitor:
                    train(model, optimizer, data, lambda loss: monitor.log(loss=loss))
            found.append(state(model, optimizer))
        assert same(*found)

    @pytest.mark.parametrize("first", ["monitor", "correction"])
    @pytest.mark.parametrize(
        "correction", [corrections.NormPin(), corrections.SpectralPenalty(), corrections.Hybrid()]
    )
    def test_beside_corrections_attached_before_or_after(
        self, correction: corrections.Correction, first: str, tmp_path: Path
    ) -> None:
        found = []
        for folder in (None, tmp_path):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(11, 8), nn.ReLU(), nn.Linear(8, 11))
            optimizer = AdamW(model.parameters(), lr=1e-3)
            attach = [lambda m=model, o=optimizer: correction.attach(m, o)]
            if folder is not None:
                attach.append(lambda m=model, o=optimizer, f=folder: monitored(f).attach(m, o))
            handles = [each() for each in (attach if first == "correction" else attach[::-1])]
            train(model, optimizer, batches(9))
            for handle in handles[::-1]:
                handle.close()
            found.append(state(model, optimizer))
        assert same(*found)

    def test_with_layers_added_on_the_way(self, tmp_path: Path) -> None:
        found = []
        for folder in (None, tmp_path):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(11, 8), nn.ReLU(), nn.Linear(8, 11))
            optimizer = SGD(model.parameters(), lr=0.1)
            monitor = None if folder is None else monitored(folder).attach(model, optimizer)
            train(model, optimizer, batches(4))
            model.append(nn.Linear(11, 11))
            optimizer.add_param_group({"params": model[-1].parameters()})
            train(model, optimizer, batches(5, seed=1))
            found.append(state(model, optimizer))
            if monitor is not None:
                monitor.close()
                names = {row.matrix for row in Run.read(tmp_path).rows if row.step == 9}
                assert "3.weight" in names and "3.weight" in Run.read(tmp_path).matrices
        assert same(*found)

    def test_under_autocast_with_a_scaler_that_skips(self, tmp_path: Path) -> None:
        found = []
        for folder in (None, tmp_path):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(11, 8), nn.ReLU(), nn.Linear(8, 11))
            optimizer = SGD(model.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            monitor = None if folder is None else monitored(folder).attach(model, optimizer)
            for i, (given, target) in enumerate(batches(9)):
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    loss = loss_of(model, given, target)
                scaler.scale(loss * (math.inf if i == 4 else 1.0)).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
            if monitor is not None:
                assert monitor.step == 8
                monitor.close()
            found.append(state(model, optimizer))
        assert same(*found)


def linear(tmp_path: Path, **options: Any) -> tuple[nn.Module, Optimizer, Monitor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(11, 8), nn.ReLU(), nn.Linear(8, 11))
    optimizer = SGD(model.parameters(), lr=0.1)
    return model, optimizer, monitored(tmp_path, **options).attach(model, optimizer)


class TestWhatIsRead:
    def test_the_first_reading_is_at_attach_and_then_every_so_many_steps(
        self, tmp_path: Path
    ) -> None:
        model, optimizer, monitor = linear(tmp_path)
        train(model, optimizer, batches(8))
        monitor.close()
        steps = [step for step, _ in Run.read(tmp_path).series("0.weight", "condition_number")]
        assert steps == [0, 3, 6]

    def test_components_are_those_of_the_weights_after_the_step(self, tmp_path: Path) -> None:
        model, optimizer, monitor = linear(tmp_path, every=1)
        with monitor:
            for batch in batches(3):
                train(model, optimizer, iter([batch]))
                values = torch.linalg.svdvals(model[0].weight.detach().double())
                rows = {
                    row["quantity"]: row
                    for row in monitor.table().to_pylist()
                    if row["matrix"] == "0.weight"
                    and row["step"] == monitor.step
                    and row["index"] is None
                }
                kappa = float(values[0] / values[-1])
                assert rows["condition_number"]["value"] == pytest.approx(kappa, rel=1e-9)
                assert rows["sigma_min"]["value"] == pytest.approx(float(values[-1]), rel=1e-9)
                assert rows["condition_number_low"]["value"] <= kappa
                assert rows["condition_number_high"]["value"] >= kappa

    def test_signals_are_projections_of_the_gradient_that_the_optimizer_uses(
        self, tmp_path: Path
    ) -> None:
        model, optimizer, monitor = linear(tmp_path, every=1, spectra_every=1)
        given, target = next(batches(1))
        loss_of(model, given, target).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
        gradient = model[0].weight.grad.clone()
        optimizer.step()
        u, s, vt = torch.linalg.svd(model[0].weight.detach(), full_matrices=False)
        expected = torch.diagonal(u.mT @ gradient @ vt.mT)
        monitor.close()
        run = Run.read(tmp_path)
        for index, value in ((0.0, expected[0]), (1.0, expected[-1]), (3 / 7, expected[3])):
            ((_, found),) = run.series("0.weight", "signal", index)
            assert found == pytest.approx(float(value), rel=1e-3, abs=1e-9)
        ((_, relative),) = run.series("0.weight", "signal_relative", 1.0)
        assert relative == pytest.approx(float(expected[-1] / s[-1]), rel=1e-3)

    def test_the_norm_of_the_gradient_is_that_which_the_optimizer_uses(
        self, tmp_path: Path
    ) -> None:
        model, optimizer, monitor = linear(tmp_path, every=2, norms_every=1)
        for given, target in batches(4):
            loss_of(model, given, target).backward()
            nn.utils.clip_grad_norm_([model[0].weight], 1e-3)
            optimizer.step()
            optimizer.zero_grad()
        monitor.close()
        series = Run.read(tmp_path).series("0.weight", "gradient_norm")
        assert [step for step, _ in series] == [1, 2, 3, 4]
        assert [norm for _, norm in series] == pytest.approx([1e-3] * 4, rel=1e-2)

    def test_decay_and_step_are_told_apart(self, tmp_path: Path) -> None:
        torch.manual_seed(0)
        model = nn.Linear(5, 4, bias=False)
        optimizer = AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
        before = model.weight.detach().clone()
        with monitored(tmp_path, every=1).attach(model, optimizer):
            model(torch.ones(1, 5)).sum().backward()
            optimizer.step()
        run = Run.read(tmp_path)
        change = model.weight.detach() - before
        step = change + 0.005 * before
        expected = {
            "update_decay": 0.005,
            "update_size": float(change.norm() / before.norm()),
            "update_step": float(step.norm() / before.norm()),
        }
        for name, value in expected.items():
            assert run.series("weight", name)[-1][1] == pytest.approx(value, rel=1e-4)

    def test_the_change_of_a_singular_value_is_predicted_to_first_order(
        self, tmp_path: Path
    ) -> None:
        model, optimizer, monitor = linear(tmp_path, every=1)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3
        train(model, optimizer, batches(4))
        monitor.close()
        run = Run.read(tmp_path)
        for end in (0.0, 1.0):
            actual = run.series("0.weight", "sigma_change", end)
            predicted = run.series("0.weight", "sigma_change_predicted", end)
            for (_, a), (_, b) in zip(actual, predicted, strict=True):
                assert b == pytest.approx(a, rel=0.05, abs=1e-7)

    def test_what_did_not_change_is_not_measured_again(self, tmp_path: Path) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 11))
        model[0].requires_grad_(False)
        optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        with monitored(tmp_path, every=1).attach(model, optimizer):
            for _ in range(3):
                model(torch.ones(1, 4)).sum().backward()
                optimizer.step()
            with torch.no_grad():
                model[0].weight.mul_(2.0)
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        steps = [step for step, _ in Run.read(tmp_path).series("0.weight", "sigma_max")]
        assert steps == [0, 4]

    def test_norms_may_come_at_every_step(self, tmp_path: Path) -> None:
        model, optimizer, monitor = linear(tmp_path, every=4, norms_every=1)
        train(model, optimizer, batches(8))
        monitor.close()
        run = Run.read(tmp_path)
        steps = [step for step, _ in run.series("0.weight", "frobenius_norm")]
        assert sorted(steps) == list(range(9))
        steps = [step for step, _ in run.series("0.weight", "gradient_norm")]
        assert sorted(steps) == list(range(1, 9))
        # of which the steps between are no readings: neither counted nor judged as such
        assert [reading.step for reading in run.readings] == [0, 4, 8]

    def test_weights_are_chosen_and_left_out_by_name(self, tmp_path: Path) -> None:
        model = transformer()
        with monitored(tmp_path, where="1.*", exclude="*.fc?.*").attach(model):
            pass
        names = {row.matrix for row in Run.read(tmp_path).rows} - {""}
        assert names and all(name.startswith("1.attn") for name in names)
        with pytest.raises(ValueError, match="no weight is called 'nothing'"):
            monitored(tmp_path, where="nothing").attach(model)

    def test_heads_and_fused_parts_are_matrices(self, tmp_path: Path) -> None:
        with monitored(tmp_path).attach(transformer()):
            pass
        run = Run.read(tmp_path)
        q = "1.attn.in_proj_weight[q]"
        assert run.matrices[q]["kind"] == "query" and run.series(q, "sigma_max")
        assert {f"1.attn[{p}.{h}]" for p in ("qk", "ov") for h in range(4)} <= {
            row.matrix for row in run.rows
        }

    def test_a_model_without_an_optimizer_is_read_when_asked(self, tmp_path: Path) -> None:
        model = nn.Linear(4, 3)
        with monitored(tmp_path).attach(model) as monitor:
            with torch.no_grad():
                model.weight.mul_(2)
            monitor.read(step=7)
        pairs = Run.read(tmp_path).series("weight", "sigma_max")
        assert [step for step, _ in pairs] == [0, 7]
        assert pairs[1][1] == pytest.approx(2 * pairs[0][1])

    def test_settings_and_losses_are_recorded(self, tmp_path: Path) -> None:
        model, optimizer, monitor = linear(tmp_path)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for batch in batches(6):
            train(model, optimizer, iter([batch]), lambda loss: monitor.log(loss=loss))
            schedule.step()
        monitor.close()
        run = Run.read(tmp_path)
        assert [entry["groups"][0]["lr"] for entry in run.settings] == [
            0.1 / 2**i for i in range(6)
        ]
        assert [step for step, _ in run.logs["loss"]] == [1, 2, 3, 4, 5, 6]

    def test_last_is_flat_and_has_at_most_200_keys(self, tmp_path: Path) -> None:
        seen = []
        model = transformer()
        optimizer = AdamW(model.parameters(), lr=1e-3)
        with monitored(tmp_path, sinks=[lambda *given: seen.append(given)]).attach(
            model, optimizer
        ) as monitor:
            train(model, optimizer, texts(3))
            last = monitor.last
        assert [step for step, _ in seen] == [0, 3] and seen[-1][1] == last
        assert 20 < len(last) <= 200 and all(isinstance(value, float) for value in last.values())
        assert {"condition_number/query", "swallowed/vector", "monitor/overhead"} <= set(last)

    def test_a_budget_takes_matrices_in_turn_and_is_kept(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = itertools.count()  # each look at it takes a unit, and a step of training 100
        look = SimpleNamespace(perf_counter=lambda: float(next(clock)), time=lambda: 0.0)
        monkeypatch.setattr(module, "time", look)
        model, optimizer, monitor = linear(tmp_path, every=1, budget=0.05, norms_every=1)
        for given, target in batches(80):
            optimizer.zero_grad()
            loss_of(model, given, target).backward()
            clock = itertools.count(next(clock) + 100)
            optimizer.step()
        monitor.close()
        run = Run.read(tmp_path)
        assert run.sessions[0].options["budget"] == 0.05
        assert run.series("", "overhead")[-1][1] < 0.06
        counts = [value for _, value in run.series("", "matrices_read")]
        assert 20 < len(counts) < 80 and min(counts) < counts[0] == 2
        read = [len(run.series(name, "sigma_max")) for name in ("0.weight", "2.weight")]
        assert min(read) > 10 and abs(read[0] - read[1]) <= 1

    @pytest.mark.parametrize("is_told", [False, True])
    def test_noise_is_that_between_micro_batches(self, is_told: bool, tmp_path: Path) -> None:
        model, optimizer, monitor = linear(tmp_path, every=1)
        random = torch.Generator().manual_seed(0)
        expected = []
        for _ in range(3):
            u, _, vt = torch.linalg.svd(model[0].weight.detach().double(), full_matrices=False)
            seen, last = [], torch.zeros(8, 11)
            optimizer.zero_grad()
            for _ in range(4):
                given = torch.randn(6, 11, generator=random)
                loss_of(model, given, torch.zeros(6, dtype=torch.long)).backward()
                if is_told:
                    monitor.microbatch()
                seen.append(float(u[:, 0] @ (model[0].weight.grad - last).double() @ vt[0]))
                last = model[0].weight.grad.clone()
            expected.append(abs(statistics.mean(seen)) / statistics.stdev(seen))
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)  # which is no micro-batch
            optimizer.step()
        monitor.close()
        found = Run.read(tmp_path).series("0.weight", "signal_to_noise", 0.0)
        assert [value for _, value in found] == pytest.approx(expected, rel=1e-3)

    def test_two_micro_batches_are_too_few_and_noise_is_that_between_readings(
        self, tmp_path: Path
    ) -> None:
        model, optimizer, monitor = linear(tmp_path, every=1)
        for _ in range(4):
            optimizer.zero_grad()
            for given, target in batches(2):
                loss_of(model, given, target).backward()
            optimizer.step()
        monitor.close()
        found = Run.read(tmp_path).series("0.weight", "signal_to_noise", 0.0)
        assert [step for step, _ in found] == [3, 4]

    def test_what_a_scaler_throws_away_is_no_micro_batch(self, tmp_path: Path) -> None:
        found = []
        for is_broken in (False, True):
            model, optimizer, monitor = linear(tmp_path / str(is_broken), every=1)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            for broken in (False, is_broken, False) if is_broken else (False, False):
                optimizer.zero_grad()
                for given, target in batches(3):
                    loss = loss_of(model, given, target) * (math.inf if broken else 1.0)
                    scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            monitor.close()
            rows = Run.read(tmp_path / str(is_broken))
            found.append(rows.series("0.weight", "signal_to_noise", 0.0))
        assert len(found[0]) == 2 and found[0] == found[1]

    def test_one_pass_a_step_is_no_micro_batch(self, tmp_path: Path) -> None:
        model, optimizer, monitor = linear(tmp_path, every=1)
        train(model, optimizer, batches(5))
        assert not any(memory.microbatches for memory in monitor._meter.memory.values())
        monitor.close()
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())

    def test_the_momentum_has_a_spectrum_with_the_whole_spectra(self, tmp_path: Path) -> None:
        torch.manual_seed(0)
        model = nn.Linear(11, 11)
        optimizer = AdamW(model.parameters(), lr=0.01)
        with monitored(tmp_path, every=1, spectra_every=3).attach(model, optimizer):
            train(model, optimizer, batches(3))
        run = Run.read(tmp_path)
        s = torch.linalg.svdvals(optimizer.state[model.weight]["exp_avg"].double())
        (stable,), (kappa,) = (
            run.series("weight", f"momentum_{q}") for q in ("stable_rank", "condition_number")
        )
        assert stable == (3, pytest.approx(float((s**2).sum() / s[0] ** 2), rel=1e-5))
        assert kappa == (3, pytest.approx(float(s[0] / s[-1]), rel=1e-4))


class TestEveryWayToStep:
    def test_a_closure(self, tmp_path: Path) -> None:
        model, optimizer, monitor = linear(tmp_path, every=1)
        given, target = next(batches(1))

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, given, target)
            loss.backward()
            return loss

        optimizer.step(closure)
        monitor.close()
        run = Run.read(tmp_path)
        assert run.step == 1 and run.series("0.weight", "signal", 0.0)

    def test_several_optimizers(self, tmp_path: Path) -> None:
        model = nn.Sequential(nn.Linear(11, 8), nn.ReLU(), nn.Linear(8, 11))
        several = [SGD(model[0].parameters(), lr=0.1), AdamW(model[2].parameters(), lr=1e-3)]
        with monitored(tmp_path, every=2).attach(model, several) as monitor:
            for given, target in batches(4):
                model.zero_grad()
                loss_of(model, given, target).backward()
                for optimizer in several:
                    optimizer.step()
            assert monitor.step == 4
        run = Run.read(tmp_path)
        for name in ("0.weight", "2.weight"):
            assert [step for step, _ in run.series(name, "update_size")] == [2, 4]

    def test_optimizers_that_step_at_their_own_pace_have_one_clock(self, tmp_path: Path) -> None:
        model = nn.Sequential(nn.Linear(11, 8), nn.ReLU(), nn.Linear(8, 11))
        often, seldom = (SGD(model[i].parameters(), lr=0.1) for i in (0, 2))
        with monitored(tmp_path, every=2).attach(model, [often, seldom]):
            for i, (given, target) in enumerate(batches(12)):
                model.zero_grad()
                loss_of(model, given, target).backward()
                often.step()
                if i % 3 == 2:
                    seldom.step()
        run = Run.read(tmp_path)
        steps = {n: [s for s, _ in run.series(n, "update_size")] for n in ("0.weight", "2.weight")}
        assert steps == {"0.weight": [2, 4, 6, 8, 10, 12], "2.weight": [6, 12]}

    def test_float64_weights(self, tmp_path: Path) -> None:
        torch.manual_seed(0)
        model = nn.Linear(11, 11).double()
        optimizer = AdamW(model.parameters())
        with monitored(tmp_path, norms_every=1).attach(model, optimizer):
            for given, target in batches(6):
                loss_of(model, given.double(), target).backward()
                optimizer.step()
        run = Run.read(tmp_path)
        assert [step for step, _ in run.series("weight", "update_size")] == [3, 6]
        assert [step for step, _ in run.series("weight", "frobenius_norm")] == list(range(7))

    def test_a_compiled_model_is_not_compiled_again(self, tmp_path: Path) -> None:
        import torch._dynamo

        model = nn.Sequential(nn.Linear(11, 8), nn.ReLU(), nn.Linear(8, 11))
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        optimizer = SGD(model.parameters(), lr=0.1)
        counter = torch._dynamo.utils.counters
        with monitored(tmp_path, every=1).attach(compiled, optimizer):
            train(compiled, optimizer, batches(1))
            frames = dict(counter["stats"])
            train(compiled, optimizer, batches(5))
            assert dict(counter["stats"]) == frames
        assert "0.weight" in Run.read(tmp_path).matrices

    @pytest.mark.filterwarnings("default")  # torch warns of itself
    def test_a_compiled_step_of_the_optimizer(self, tmp_path: Path) -> None:
        found = []
        for folder in (None, tmp_path):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(11, 8), nn.ReLU(), nn.Linear(8, 11))
            optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
            step = torch.compile(lambda o=optimizer: o.step(), backend="eager")
            monitor = None if folder is None else monitored(folder).attach(model, optimizer)
            for given, target in batches(6):
                optimizer.zero_grad()
                loss_of(model, given, target).backward()
                step()
            if monitor is not None:
                monitor.close()
            found.append(state(model, optimizer))
        assert same(*found)
        assert [step for step, _ in Run.read(tmp_path).series("0.weight", "signal", 0.0)] == [3, 6]

    def test_a_step_within_a_step_is_one(self, tmp_path: Path) -> None:
        class Twice(SGD):
            def step(self, closure: Any = None) -> Any:
                return super().step(closure)

        model = nn.Linear(11, 11)
        optimizer = Twice(model.parameters(), lr=0.1)
        with monitored(tmp_path, every=1).attach(model, optimizer) as monitor:
            train(model, optimizer, batches(3))
            assert monitor.step == 3

    def test_it_sees_the_weight_before_and_after_a_correction(self, tmp_path: Path) -> None:
        for first in ("monitor", "correction"):
            torch.manual_seed(0)
            model = nn.Linear(11, 11, bias=False)
            optimizer = SGD(model.parameters(), lr=0.1)
            folder = tmp_path / first
            attach = [
                lambda m=model, o=optimizer: corrections.NormPin().attach(m, o),
                lambda m=model, o=optimizer, f=folder: monitored(f, every=1).attach(m, o),
            ]
            handles = [each() for each in (attach if first == "correction" else attach[::-1])]
            norm = float(model.weight.detach().norm())
            train(model, optimizer, batches(3))
            for handle in handles:
                handle.close()
            for _, found in Run.read(folder).series("weight", "frobenius_norm"):
                assert found == pytest.approx(norm, rel=1e-5)

    @pytest.mark.parametrize("first", ["monitor", "correction"])
    def test_the_signal_is_that_of_the_whole_weight_where_factors_are_trained(
        self, first: str, tmp_path: Path
    ) -> None:
        torch.manual_seed(0)
        model = nn.Linear(11, 11, bias=False)
        optimizer = SGD(model.parameters(), lr=0.1)
        attach = [
            lambda: corrections.Multipliers(rate=1.0).attach(model, optimizer),
            lambda: monitored(tmp_path, every=1).attach(model, optimizer),
        ]
        handles = [each() for each in (attach if first == "correction" else attach[::-1])]
        expected = []
        for x, _ in batches(4):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            u, _, vt = torch.linalg.svd(model.weight.detach().double())  # read after the step
            assert model.weight.grad is not None
            expected.append(float(u[:, 0] @ model.weight.grad.double() @ vt[0]))
        for handle in handles:
            handle.close()
        run = Run.read(tmp_path)
        found = [value for _, value in run.series("weight", "signal", 0.0)]
        # a correction that came later may add to the first gradient after the monitor has seen it
        assert len(found) == 3 + (first == "correction")
        assert found == pytest.approx(expected[-len(found) :], rel=1e-3)
        spread = [value for _, value in run.series("weight", "correction_spread")]
        assert len(spread) == 4 and spread[-1] > 1

    def test_a_step_that_raised_within_a_step_does_not_end_the_record(self, tmp_path: Path) -> None:
        class Twice(SGD):
            fails = False

            def step(self, closure: Any = None) -> Any:
                result = super().step(closure)
                if self.fails:
                    raise KeyError("inside")
                return result

        model = nn.Linear(11, 11)
        optimizer = Twice(model.parameters(), lr=0.1)
        with monitored(tmp_path, every=1).attach(model, optimizer) as monitor:
            train(model, optimizer, batches(2))
            optimizer.fails = True
            with pytest.raises(KeyError):
                train(model, optimizer, batches(1))
            optimizer.fails = False
            train(model, optimizer, batches(2))
            assert monitor.step == 4
        assert "step" not in vars(optimizer)


class Syncs(TorchDispatchMode):
    """Count the reads of a tensor's value by the host."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


class TestManners:
    def test_steps_without_a_reading_wait_for_nothing_and_readings_at_most_twice(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        waits, brought = [0], module.on_host

        def counted(tensors: Any) -> Any:
            waits[0] += bool(tensors)
            return brought(tensors)

        for place in (module, source):
            monkeypatch.setattr(place, "on_host", counted)
        model, optimizer, monitor = linear(tmp_path, every=3, norms_every=1)
        counts, reads = [], []
        with corrections.NormPin().attach(model, optimizer):
            for given, target in batches(6):
                optimizer.zero_grad()
                for _ in range(2):
                    loss_of(model, given, target).backward()
                monitor.log(loss=torch.tensor(1.0))
                before = waits[0]
                with Syncs() as syncs:
                    optimizer.step()
                counts.append(waits[0] - before)
                reads.append(syncs.count)
        monitor.close()
        assert counts == [0, 0, 2, 0, 0, 2]
        assert len({reads[i] for i in (0, 1, 3, 4)}) == 1

    def test_closing_leaves_no_hook_and_no_reference(self, tmp_path: Path) -> None:
        model, optimizer, monitor = linear(tmp_path)
        train(model, optimizer, batches(3))
        monitor.close()
        monitor.close()
        assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
        train(model, optimizer, batches(3))
        assert Run.read(tmp_path).step == 3

    def test_one_that_was_never_closed_goes_with_its_model(self, tmp_path: Path) -> None:
        model, optimizer, monitor = linear(tmp_path)
        train(model, optimizer, batches(3))
        kept = weakref.ref(monitor), weakref.ref(model)
        monitor._recorder.close()  # of files that are not closed Python would complain
        monitor._claim.close()
        del model, optimizer, monitor
        gc.collect()
        assert [reference() for reference in kept] == [None, None]

    def test_memory_does_not_grow(self, tmp_path: Path) -> None:
        model, optimizer, monitor = linear(tmp_path, every=10)

        def kept() -> int:
            gc.collect()
            return sum(issubclass(type(each), Tensor) for each in gc.get_objects())

        train(model, optimizer, batches(100))
        before = kept()
        train(model, optimizer, batches(200))
        assert kept() <= before + 8
        monitor.close()

    @pytest.mark.parametrize("place", ["components", "ends_signal", "whole_spectrum"])
    def test_an_error_inside_warns_once_and_training_goes_on(
        self, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, optimizer, monitor = linear(tmp_path, strict=False, every=1, spectra_every=1)

        def broken(*_: Any) -> Any:
            raise RuntimeError("broken on purpose")

        monkeypatch.setattr(f"kappascope.monitor.measure.{place}", broken)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            train(model, optimizer, batches(4))
        (text,) = [str(each.message) for each in told]  # a large model has hundreds of matrices
        assert text.startswith("kappascope's monitor: 0.weight could not be measured")
        assert "broken on purpose" in text and "training goes on" in text
        monitor.close()

    def test_strict_raises(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model, optimizer, monitor = linear(tmp_path, strict=True, every=1)
        monkeypatch.setattr("kappascope.monitor.measure.components", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(model, optimizer, batches(1))
        monitor.close()

    def test_a_full_disk_warns_once_and_training_goes_on(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, optimizer, monitor = linear(tmp_path, strict=False, every=1)

        def full(*_: Any) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "write", full)
        with pytest.warns(RuntimeWarning, match="No space left") as told:
            train(model, optimizer, batches(4))
        assert len(told) == 1
        monkeypatch.undo()
        train(model, optimizer, batches(1))
        monitor.close()
        assert Run.read(tmp_path).step == 5

    def test_a_folder_that_cannot_be_made_warns_and_training_goes_on(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("in the way")
        model = nn.Linear(11, 11)
        optimizer = SGD(model.parameters(), lr=0.1)
        with pytest.warns(RuntimeWarning, match="cannot be begun"):
            monitor = Monitor(tmp_path / "file" / "run", every=1).attach(model, optimizer)
        train(model, optimizer, batches(2))
        assert monitor.step == 2 and monitor.last
        monitor.close()

    def test_what_is_logged_does_not_pile_up_where_no_reading_comes(self, tmp_path: Path) -> None:
        for folder, options in (("a", {"every": 5, "budget": 1e-9}), ("b", {"every": 10**6})):
            model, optimizer, monitor = linear(tmp_path / folder, **options)
            most = 0
            for batch in batches(100):
                train(model, optimizer, iter([batch]), lambda loss, to=monitor: to.log(loss=loss))
                most = max(most, len(monitor._pending))
            assert most <= (10 if folder == "a" else module.PENDING_LOGS)
            assert len(Run.read(tmp_path / folder).logs["loss"]) > 60  # while it runs
            monitor.close()
            assert len(Run.read(tmp_path / folder).logs["loss"]) == 100

    def test_weights_that_become_nan_are_an_alert_and_leave_the_ring(self, tmp_path: Path) -> None:
        told: list[Alert] = []
        model, optimizer, monitor = linear(tmp_path, every=5, on_alert=told.append)
        for i, batch in enumerate(batches(25)):
            if i == 17:
                with torch.no_grad():
                    model[2].weight[0, 0] = math.nan
            train(model, optimizer, iter([batch]), lambda loss: monitor.log(loss=loss))
        monitor.close()
        run = Run.read(tmp_path)
        names = {alert.name for alert in told}
        assert "non-finite" in names and told == run.alerts
        assert len({(alert.name, alert.matrix) for alert in told}) == len(told)
        assert run.rings and len(run.rings[0]["steps"]) > 8

    def test_an_exception_in_the_loop_leaves_the_ring(self, tmp_path: Path) -> None:
        model, optimizer, monitor = linear(tmp_path)
        with pytest.raises(KeyError), monitor:
            train(model, optimizer, batches(5))
            raise KeyError("the user's own")
        run = Run.read(tmp_path)
        assert run.is_closed and "KeyError" in run.rings[-1]["text"]

    def test_a_parameter_that_nobody_steps_is_an_alert(self, tmp_path: Path) -> None:
        model = nn.Sequential(nn.Linear(11, 8), nn.Linear(8, 11))
        optimizer = SGD(model[1].parameters(), lr=0.1)
        with monitored(tmp_path, every=2).attach(model, optimizer) as monitor:
            train(model, optimizer, batches(6))
        (alert,) = [each for each in monitor.alerts if each.name == "not-stepped"]
        assert "0.weight" in alert.text and alert.step == 2

    def test_parameters_stepped_twice_are_one_alert(self, tmp_path: Path) -> None:
        model = nn.Sequential(*(nn.Linear(11, 11) for _ in range(4)))
        several = [SGD(model.parameters(), lr=0.1), SGD(model[1:].parameters(), lr=0.1)]
        with monitored(tmp_path).attach(model, several) as monitor:
            pass
        (alert,) = monitor.alerts
        assert alert.name == "stepped-twice" and alert.matrix == "1.weight"
        assert alert.text.startswith("1.weight, 1.bias, 2.weight and 3 more: more than one")

    def test_it_can_be_attached_again(self, tmp_path: Path) -> None:
        model, optimizer, monitor = linear(tmp_path, every=2)
        train(model, optimizer, batches(4))
        monitor.close()
        monitor.attach(model, optimizer)
        train(model, optimizer, batches(4))
        monitor.close()
        assert not optimizer._optimizer_step_pre_hooks
        steps = [step for step, _ in Run.read(tmp_path).series("0.weight", "update_size")]
        assert steps == [2, 4, 6, 8]

    def test_before_it_is_attached_it_has_nothing_to_tell(self, tmp_path: Path) -> None:
        monitor = Monitor(tmp_path)
        assert monitor.step == 0 and monitor.last == {} and not monitor.is_attached
        monitor.close()
        with pytest.raises(ValueError, match="not attached"):
            monitor.read()

    def test_a_learning_rate_of_zero_swallows_nothing(self, tmp_path: Path) -> None:
        model, optimizer, monitor = linear(tmp_path, every=1)
        optimizer.param_groups[0]["lr"] = 0.0
        train(model, optimizer, batches(4))
        monitor.close()
        assert not monitor.alerts and not Run.read(tmp_path).series("0.weight", "swallowed")

    def test_a_single_quantity_may_be_named_alone(self, tmp_path: Path) -> None:
        assert Monitor(tmp_path, quantities="signal").quantities == {"signal"}

    def test_what_is_logged_and_no_number_warns_and_is_left_out(self, tmp_path: Path) -> None:
        model, optimizer, monitor = linear(tmp_path, every=1, strict=False)
        with pytest.warns(RuntimeWarning, match="what was logged is no number"):
            monitor.log(loss=1.0, accuracy=None)  # type: ignore[arg-type]
        monitor.log(loss=2.0)
        train(model, optimizer, batches(1))
        monitor.close()
        monitor.log(loss=3.0)
        assert Run.read(tmp_path).logs == {"loss": [(0, 2.0)]}

    def test_it_cannot_be_copied(self, tmp_path: Path) -> None:
        monitor = Monitor(tmp_path)
        with pytest.raises(TypeError, match="attach anew"):
            copy.deepcopy(monitor)

    @pytest.mark.parametrize(
        "options",
        [
            *({"every": 0}, {"every": 1.5}, {"budget": 2}, {"spectra_every": 0}),
            *({"quantities": ["x"]}, {"quantities": "x"}, {"ghosts": 1}, {"sinks": [3]}),
        ],
    )
    def test_what_makes_no_sense_is_refused(self, options: dict[str, Any], tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="expected"):
            Monitor(tmp_path, **options)

    def test_what_is_no_model_or_optimizer_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(TypeError, match="expected a module"):
            Monitor(tmp_path).attach({})  # type: ignore[arg-type]
        with pytest.raises(
            TypeError, match="expected an optimizer or a list of some; got list of int"
        ):
            Monitor(tmp_path).attach(nn.Linear(2, 2), [1])  # type: ignore[list-item]


class TestResuming:
    def test_a_run_goes_on_and_says_where_it_was_cut(self, tmp_path: Path) -> None:
        model, optimizer, monitor = linear(tmp_path)
        train(model, optimizer, batches(7))
        monitor._undo.close()  # as if the process had been killed: nothing is finished
        monitor._recorder.close()
        monitor._claim.close()
        again = monitored(tmp_path).attach(model, optimizer)
        assert again.step == 6
        train(model, optimizer, batches(3))
        again.close()
        run = Run.read(tmp_path)
        assert [session.step for session in run.sessions] == [0, 6]
        assert "was cut after step 6" in run.sessions[1].cut
        steps = [step for step, _ in run.series("0.weight", "condition_number")]
        assert steps == [0, 3, 6, 9]

    def test_a_run_taken_up_from_an_earlier_checkpoint_supersedes(self, tmp_path: Path) -> None:
        model, optimizer, monitor = linear(tmp_path)
        train(model, optimizer, batches(9))
        monitor.close()
        again = monitored(tmp_path).attach(model, optimizer, step=3)
        train(model, optimizer, batches(3))
        again.close()
        run = Run.read(tmp_path)
        assert "superseded" in run.sessions[1].cut
        assert [s for s, _ in run.series("0.weight", "sigma_max")] == [0, 3, 6]

    def test_an_alert_is_told_again_only_where_it_was_superseded(self, tmp_path: Path) -> None:
        told: list[Alert] = []
        for start in (0, 3, 6):
            torch.manual_seed(0)
            model = nn.Linear(11, 11)
            optimizer = SGD(model.parameters(), lr=0.1)
            monitor = monitored(tmp_path, on_alert=told.append).attach(model, optimizer, step=start)
            train(model, optimizer, batches(2))
            monitor.log(loss=math.nan)
            train(model, optimizer, batches(1))
            monitor.close()
        # the second session goes on after step 2, where the first was told; so does the third
        assert [(alert.name, alert.step) for alert in told] == [("non-finite", 2)]
        monitor = monitored(tmp_path, on_alert=told.append).attach(model, optimizer, step=1)
        monitor.log(loss=math.nan)
        monitor.close()
        assert [alert.step for alert in told] == [2, 1]

    def test_what_was_told_of_several_matrices_is_not_told_again_by_a_session_that_goes_on(
        self, tmp_path: Path
    ) -> None:
        told: list[Alert] = []
        for _ in range(2):
            _, _, monitor = linear(tmp_path / "run", every=1, on_alert=told.append)
            ill = {name: {"non_finite": 1.0} for name in ("0.weight", "2.weight")}
            monitor._alert(monitor._watch.reading(0, ill))
            monitor.close()
        (alert,) = told
        assert (alert.matrix, alert.others) == ("0.weight", ("2.weight",))
        run = Run.read(tmp_path / "run")
        assert run.alerts == [alert]
        assert [each.name for each in standings(run) if each.alerts] == ["0.weight", "2.weight"]

    def test_a_folder_that_another_monitor_writes_is_refused_before_anything_is_attached(
        self, tmp_path: Path
    ) -> None:
        model, optimizer, monitor = linear(tmp_path)
        other = nn.Linear(11, 11)
        descent = SGD(other.parameters(), lr=0.1)
        second = Monitor(tmp_path)
        with pytest.raises(Refusal, match=r"records a run there .*name another folder"):
            second.attach(other, descent)
        assert not second.is_attached and not descent._optimizer_step_post_hooks
        train(model, optimizer, batches(3))
        monitor.close()
        second.attach(other, descent).close()
        assert [session.step for session in Run.read(tmp_path).sessions] == [0, 3]


class TestAudit:
    @pytest.mark.parametrize("is_honest", [True, False])
    def test_steps_that_are_undone_are_no_part_of_the_record(
        self, is_honest: bool, tmp_path: Path
    ) -> None:
        model = nn.Sequential(nn.Linear(11, 8), nn.ReLU(), nn.Linear(8, 11))
        optimizer = (AdamW if is_honest else Forgetful)(model.parameters(), lr=1e-2)
        given, target = next(batches(1))
        with monitored(tmp_path, every=1).attach(model, optimizer) as monitor:
            result = monitor.audit(lambda: loss_of(model, given, target).backward())
            assert result.passed == is_honest and monitor.audited is result
            assert monitor.step == 0
        assert [alert.name for alert in Run.read(tmp_path).alerts] == ["audit"] * (not is_honest)

    @pytest.mark.parametrize("is_honest", [True, False])
    def test_the_next_steps_of_the_training_are_looked_at(
        self, is_honest: bool, tmp_path: Path
    ) -> None:
        found = []
        for folder in (None, tmp_path):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(11, 8), nn.ReLU(), nn.Linear(8, 11))
            optimizer = (AdamW if is_honest else Forgetful)(model.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
            train(model, optimizer, batches(3))
            monitor = None if folder is None else monitored(folder).attach(model, optimizer)
            if monitor is not None:
                monitor.audit()
            for given, target in batches(7):
                optimizer.zero_grad()
                loss_of(model, given, target).backward()
                optimizer.step()
                schedule.step()
            found.append(state(model, optimizer))
            if monitor is not None:
                assert monitor.audited is not None and monitor.audited.steps == 5
                assert monitor.audited.passed == is_honest and monitor.step == 7
                monitor.close()
        assert same(*found)
        alerts = Run.read(tmp_path).alerts
        assert [alert.name for alert in alerts] == ["audit"] * (not is_honest)
        assert is_honest or "does not do what its name says (step 5)" in alerts[0].text

    def test_an_audit_that_was_begun_ends_with_the_monitor(self, tmp_path: Path) -> None:
        model, optimizer, monitor = linear(tmp_path)
        monitor.audit()
        train(model, optimizer, batches(2))
        monitor.close()
        assert monitor.audited is None and "step" not in vars(optimizer)
        assert not any(p._backward_hooks for p in model.parameters())


class Forgetful(AdamW):
    """AdamW that forgets its momentum before every step."""

    def step(self, closure: Any = None) -> Any:
        for kept in self.state.values():
            kept["exp_avg"].zero_()
        return super().step(closure)
