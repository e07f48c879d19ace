"""Diagnosis of models and files: the same numbers by every road, and nothing lost on the way."""

import copy
import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import kappascope
import odd_models
from kappascope import corrections
from kappascope.clinic import diagnose as diagnosing
from kappascope.clinic import source as sources
from kappascope.clinic.diagnose import Selection, case, diagnose
from kappascope.clinic.diagnosis import Diagnosis, product_document
from kappascope.clinic.tasks import TensorTask
from kappascope.matrix.status import Outcome, Status
from kappascope.model.chains import Chain
from kappascope.model.skipped import Reason, ReasonKind, Skipped, acts_beside
from kappascope.refusal import Refusal
from worker_tasks import dies, hangs, hoards


def model() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.Sequential(nn.Embedding(20, 16), nn.TransformerEncoder(layer, 2), nn.Linear(16, 20))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "model.pt"
    torch.save(model().state_dict(), path)
    return path


@pytest.fixture(scope="module")
def found(saved: Path) -> Diagnosis:
    return diagnose(saved, jobs=2)


def test_a_file_and_the_model_in_memory_give_the_same_numbers(found: Diagnosis) -> None:
    there = diagnose(model().state_dict())
    assert [row.name for row in found.matrices] == [row.name for row in there.matrices]
    assert found.matrices == there.matrices
    assert found.chains == there.chains


def test_the_public_name_is_a_function() -> None:
    assert kappascope.diagnose is diagnose
    assert [row.name for row in kappascope.diagnose(nn.Linear(2, 3)).matrices] == ["weight"]


def test_public_functions_are_not_replaced_by_modules_of_their_name() -> None:
    import kappascope.clinic.diagnose
    import kappascope.model.matrices  # what a user or a worker may well load

    assert dict(kappascope.matrices({"w": torch.eye(2)})).keys() == {"w"}
    assert kappascope.diagnose is diagnose


def test_heads_of_a_module_give_products() -> None:
    found = diagnose(model())
    assert {product.kind for product in found.products} == {"QK", "OV"}
    assert len(found.products) == 2 * 2 * 2


def test_layers_that_follow_one_another_give_chains() -> None:
    found = diagnose(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)))
    (chain,) = found.chains
    assert chain.condition_number <= chain.bound * (1 + 1e-9)


def test_include_and_exclude_choose_and_the_rest_is_listed(saved: Path) -> None:
    found = diagnose(saved, include=["linear"], exclude=["*.1.linear2*"], jobs=1)
    assert {row.name.split(".")[-2] for row in found.matrices} == {"linear1", "linear2"}
    assert len(found.matrices) == 3
    assert Skipped("0.weight", Reason(ReasonKind.NOT_CHOSEN, "not chosen")) in found.skipped
    assert not found.failed


def test_a_part_can_be_chosen_without_its_whole() -> None:
    found = diagnose(nn.MultiheadAttention(4, 2), include=["[[]q[]]"])
    assert [row.name for row in found.matrices] == []
    found = diagnose(nn.MultiheadAttention(4, 2), include=["weight[q]"])
    assert [row.name for row in found.matrices] == ["in_proj_weight[q]"]


def test_a_reference_gives_errors_by_name(saved: Path, tmp_path: Path) -> None:
    other = model().state_dict()
    del other["0.weight"]
    other["2.weight"] *= 2
    torch.save(other, tmp_path / "other.pt")
    rows = {row.name: row for row in diagnose(tmp_path / "other.pt", saved, jobs=1).matrices}
    assert rows["2.weight"].errors["frobenius_norm"] == pytest.approx(1.0)
    assert rows["2.weight"].errors["condition_number"] == pytest.approx(0.0, abs=1e-9)
    back = {row.name: row for row in diagnose(saved, tmp_path / "other.pt", jobs=1).matrices}
    assert back["0.weight"].errors is None
    assert str(back["0.weight"].reasons["errors"]) == "not in the reference"


def test_what_is_not_finite_fails_alone() -> None:
    weights = {"a.weight": torch.randn(4, 4), "b.weight": torch.full((3, 3), math.nan)}
    found = diagnose(weights)
    assert [row.failure is None for row in found.matrices] == [True, False]
    reason = Reason(ReasonKind.NON_FINITE, "non-finite (9 of 9), first at [0, 0]")
    assert found.failed == (Skipped("b.weight", reason),)
    assert found.findings[0].severity == "critical"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_vector_that_is_not_finite_is_critical_in_a_file_and_in_memory(
    value: float, tmp_path: Path
) -> None:
    sick = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    sick[0].bias.data[2] = sick[1].running_var[0] = value
    torch.save({"model": sick.state_dict(), "mask": torch.tensor([-math.inf])}, tmp_path / "x.pt")
    for found in (diagnose(sick), diagnose(tmp_path / "x.pt", jobs=1)):
        told = {one.subject: one.evidence for one in found.above("critical")}
        assert told == {"0.bias": "non-finite (1 of 4), first at [2]",
                        "1.running_var": "non-finite (1 of 4), first at [0]"}  # fmt: skip
        assert {one.name for one in found.failed} == set(told)
        assert Skipped("0.bias", acts_beside("one-dimensional")) in found.skipped
    assert not diagnose(sick, exclude=["bias", "var"]).failed


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mask_decoder.mlp.bias", (4,)),  # SAM
        ("attn.mask", (4,)),
        ("mlp.experts.gate_up_proj_bias", (2, 4)),
        ("up.scales", (2, 4)),
        ("rotary_emb.cos_cached", (2, 4)),
    ],
)
def test_whatever_acts_beside_a_matrix_is_looked_at(name: str, shape: tuple[int, ...]) -> None:
    sick = {"up.qweight": torch.ones(2, 4).int(), name: torch.full(shape, math.nan)}
    assert [one.subject for one in diagnose(sick).above("critical")] == [name]


def test_a_vector_behind_another_of_its_name_is_looked_at_too() -> None:
    sound, sick = torch.ones(2), torch.tensor([math.nan, 1.0])
    for first, second in ((sick, sound), (sound, sick)):
        found = diagnose({"model": {"fc.bias": first}, "module": {"fc.bias": second}})
        assert len(found.above("critical")) == 1


def test_a_flattened_model_is_not_read_as_a_vector() -> None:
    flat = torch.full((1,), math.nan).expand(2**40)
    assert not diagnose({"flat": flat, "w": torch.eye(2)}).failed


def test_a_chain_that_fails_is_among_what_failed_and_one_left_out_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*args: object) -> Chain:
        raise ZeroDivisionError("float division by zero")

    with monkeypatch.context() as context:
        context.setattr(diagnosing.Links, "chain", fails)
        found = diagnose({"fc1.weight": torch.eye(4), "fc2.weight": torch.eye(4)})
    told = [(one.name, str(one.reason)) for one in found.failed]
    reason = "ZeroDivisionError: float division by zero"
    assert told == [("fc1.weight > fc2.weight", reason)]
    assert found.document()["chains"][0]["reasons"] == {
        "condition_number": reason,
        "bound": reason,
    }
    too_wide = Status(Outcome.SKIPPED, "too wide")
    left_out = Chain("a > b", ("a", "b"), (9, 9, 9), None, False, None, too_wide)
    assert Diagnosis("toy", chains=(left_out,)).failed == ()


@pytest.mark.parametrize("name", ["missing", "empty.pt", "text.safetensors", "a\0b"])
def test_what_is_no_checkpoint_is_refused(name: str, tmp_path: Path) -> None:
    if name != "missing" and "\0" not in name:
        (tmp_path / name).write_bytes(b"" if "empty" in name else b"<html>no</html>")
    with pytest.raises(Refusal) as refusal:
        diagnose(tmp_path / name)
    assert refusal.value.code == 2


@pytest.mark.parametrize(
    ("deed", "code", "words"),
    [(dies, 2, "SIGABRT"), (hangs, 5, "more than 1 s"), (hoards, 2, "too much memory")],
)
def test_a_file_that_harms_its_reader_ends_in_one_line(
    deed, code, words, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosing.Inventory, "of", deed)
    # a busy machine takes its time to get as far as the deed
    monkeypatch.setattr(sources.OnDisk, "parse_seconds", 1.0 if deed is hangs else 60.0)
    with pytest.raises(Refusal, match=words) as refusal:
        case(saved)
    assert refusal.value.code == code


def test_a_matrix_that_takes_too_long_fails_alone(saved: Path) -> None:
    taken = case(saved, jobs=1)
    taken = diagnosing.replace(taken, engine=diagnosing.replace(taken.engine, limit=1e-3))
    rows = [row for done in taken.examine() for row in done.result]
    found = taken.concluded(rows)
    assert found.matrices and all("timeout" in row.status for row in found.matrices)
    assert found.analysed == () and found.verdict == ("Nothing could be examined.",)


def test_a_matrix_that_needs_more_than_is_allowed_is_refused_before_it_is_read() -> None:
    large = torch.ones(1, 1).expand(40_000, 40_000)  # of which every copy would take gigabytes
    found = diagnose({"w": torch.eye(3), "large": large}, memory="4G")
    assert [row.name for row in found.analysed] == ["w"]
    (failed,) = found.failed
    assert failed.reason.kind is ReasonKind.NO_MEMORY
    words = r"needs \d+\.\d GB of memory, more than the 4\.0 GB that a worker may use \(--memory\)"
    assert re.fullmatch(words, str(failed.reason))


def test_a_matrix_that_needs_more_than_is_free_is_refused_and_workers_get_no_more(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 2**31
    monkeypatch.setattr(diagnosing, "available_bytes", lambda: free)
    (failed,) = diagnose({"large": torch.ones(1, 1).expand(40_000, 40_000)}).failed
    assert "2.0 GB that are free" in str(failed.reason)
    engine = case(saved, jobs=64).engine
    assert engine.memory <= free and engine.jobs <= 4
    monkeypatch.setattr(diagnosing, "available_bytes", lambda: None)
    assert case(saved, jobs=64).engine.jobs == 64


def test_a_given_memory_is_the_workers(saved: Path) -> None:
    assert case(saved, memory=3 * 2**30).engine.memory == 3 * 2**30
    with pytest.raises(ValueError, match="like 8G"):
        diagnose({"w": torch.eye(2)}, memory="much")


def test_after_a_short_task_whose_row_is_shown_soon_the_largest_come_first(saved: Path) -> None:
    tasks = case(saved).tasks
    first, *others = (task.effort for task in tasks)
    assert first == min(task.effort for task in tasks if isinstance(task, TensorTask))
    assert others == sorted(others, reverse=True)


def test_patterns_are_parts_or_shell_patterns() -> None:
    selection = Selection(include=("layers.*.weight",), exclude=("embed",))
    assert selection.takes("layers.0.weight") and not selection.takes("layers.0.bias")
    assert not selection.takes("layers.embed.weight")


def test_with_a_reference_every_matrix_has_errors_or_a_reason() -> None:
    bad = torch.full((3, 3), torch.nan)
    theirs = {"a": torch.eye(3), "b": bad, "c": torch.eye(3), "d": torch.eye(4)}
    source = {"a": bad, "b": torch.eye(3), "e": torch.eye(3), "d": torch.eye(3)}
    rows = diagnose(source, reference=theirs).document()["matrices"]
    assert all(row["errors"] is None for row in rows)
    reasons = {row["name"]: row["reasons"]["errors"] for row in rows}
    assert "non-finite" in reasons["a"] and "the reference failed" in reasons["b"]
    assert reasons["e"] == "not in the reference" and "another shape" in reasons["d"]


def test_every_error_that_is_missing_has_its_reason() -> None:
    zero, plain, singular = torch.zeros(3, 3), torch.randn(3, 3), torch.ones(3, 3)
    source = {"a": plain, "b": zero, "c": plain.clone(), "d": plain.clone()}
    theirs = {"a": zero, "b": plain, "c": singular, "d": plain.int()}
    found = diagnose(source, reference=theirs)
    rows = {row["name"]: row for row in found.document()["matrices"]}
    assert rows["a"]["errors"] is None and "zero" in rows["a"]["reasons"]["errors"]
    assert rows["d"]["reasons"]["errors"] == "in the reference: torch.int32"
    assert rows["b"]["errors"]["singular_values"] == 1.0
    assert "reference" in rows["c"]["reasons"]["errors.condition_number"]
    for row in (rows["b"], rows["c"]):
        missing = {f"errors.{name}" for name, error in row["errors"].items() if error is None}
        assert missing and missing <= row["reasons"].keys()
    assert {name for name, _ in found.uncompared} == {"a", "d"} and not found.incomparable


def test_nothing_is_called_unlike_that_is_there() -> None:
    source, broken = {"w": torch.eye(3)}, {"w": torch.full((3, 3), torch.nan)}
    for theirs in (broken, {"w": torch.eye(3).int()}, {"w": torch.zeros(3, 3)}):
        assert diagnose(source, reference=theirs).incomparable == "no matrix could be compared"
    for theirs in ({"v": torch.eye(3)}, {"w": torch.eye(4)}):
        assert diagnose(source, reference=theirs).incomparable.startswith("nothing there has")


def test_numbers_inside_a_field_have_their_reasons() -> None:
    (zero,) = diagnose({"w": torch.zeros(3, 3)}).matrices
    assert zero.row_norms.cv is None and zero.reasons["row_norms.cv"] == "zero matrix"
    (part,) = diagnose({"w": torch.randn(900, 900)}, spectrum="none").matrices
    missing = {f"effective_ranks.{name}" for name, it in part.effective_ranks.items() if it is None}
    assert missing and missing <= part.reasons.keys()


def test_a_comparison_factorizes_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "kappascope.matrix.spectra.singular_values", lambda matrix: pytest.fail("again")
    )
    (row,) = diagnose({"w": torch.eye(4)}, {"w": torch.eye(4)}, spectrum="none").matrices
    assert row.errors["condition_number"] == 0.0


def test_why_a_tensor_cannot_be_read_is_told_once(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"w": torch.ones(8, 8)}, path)
    data = path.read_bytes()
    path.write_bytes(data.replace(torch.ones(8, 8).numpy().tobytes(), bytes(256)))
    (lost,) = diagnose(path, jobs=1).failed
    assert str(lost.reason) == "damaged: the checksum of its content is another"
    torch.save({"w": torch.ones(8, 8)}, tmp_path / "y.pt")
    found = diagnose(tmp_path / "y.pt", path, jobs=1)
    (lost,) = found.failed
    reason = "damaged: the checksum of its content is another"
    assert str(lost.reason) == f"not compared: the reference cannot be read: {reason}"
    assert [row.effective_rank for row in found.analysed] == [1]


def test_a_script_without_a_guard_is_not_run_again(saved: Path, tmp_path: Path) -> None:
    import subprocess
    import sys

    script = tmp_path / "script.py"
    script.write_text(
        f"""
import kappascope
print("once")
print(len(kappascope.diagnose({str(saved)!r}, jobs=1).analysed))
"""
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    once, count = done.stdout.split()
    assert once == "once" and int(count) > 0


def test_chains_stand_in_the_order_of_the_model_whichever_ends_first(saved: Path) -> None:
    looked = case(saved, jobs=1)
    rows = [row for done in looked.examine() for row in done.result]
    assert len(looked.concluded(rows).chains) > 1
    assert looked.concluded(reversed(rows)).chains == looked.concluded(rows).chains


@pytest.mark.parametrize("jobs", [0, -1])
def test_no_job_is_refused_before_anything_is_opened(jobs: int, saved: Path) -> None:
    with pytest.raises(ValueError, match=f"jobs of 1 or more, got {jobs}"):
        diagnose(saved, jobs=jobs)


def test_one_pattern_may_be_a_string() -> None:
    weights = {"up.weight": torch.eye(3), "down.weight": torch.eye(3)}
    assert [row.name for row in diagnose(weights, exclude="down").matrices] == ["up.weight"]
    assert [row.name for row in diagnose(weights, include="down").matrices] == ["down.weight"]


def test_a_spectrum_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="one of auto, full, none for spectrum, got 'all'"):
        diagnose(nn.Linear(2, 2), spectrum="all")  # type: ignore[arg-type]


def test_a_file_is_parsed_in_other_processes_whichever_side_it_is(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = model()
    weights.register_forward_hook(lambda *_: None)  # cannot be pickled, and need not be
    monkeypatch.setattr(sources.open, "open", lambda _: pytest.fail("parsed here"))
    for found in (diagnose(weights, saved, jobs=1), diagnose(saved, weights, jobs=1)):
        assert found.matrices and not found.failed
        assert all(row.errors["overall_matrix"] == 0 for row in found.matrices)


@pytest.mark.parametrize("name", ["Multipliers", "Hybrid", "SingularValueMultipliers"])
def test_a_checkpoint_with_factors_beside_weights_is_read_as_the_layers_used_it(
    name: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 9), nn.Unflatten(1, (1, 9)), nn.Conv1d(1, 4, 3), nn.Flatten(),
                        nn.Linear(28, 28), nn.ReLU(), nn.Linear(28, 5))  # fmt: skip
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    handle = getattr(corrections, name)().attach(net, optimizer)
    for _ in range(9):
        optimizer.zero_grad()
        net(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
    parts = handle.split(net.state_dict())  # as older versions saved them
    torch.save({"model": parts}, tmp_path / "x.pt")
    used = {f"{k}.weight": net[k].weight.detach() for k in (0, 2, 4, 6)}
    original = parts["0.parametrizations.weight.original"]
    assert not torch.allclose(used["0.weight"], original, rtol=1e-5)
    found, there = diagnose(tmp_path / "x.pt", used, jobs=1), diagnose(parts)
    assert [row.name for row in found.matrices] == list(used)
    assert all(row.errors["overall_matrix"] < 1e-6 for row in found.matrices)
    assert found.matrices[0].sigma_min == there.matrices[0].sigma_min
    factors = [one for one in found.skipped if ".weight.0." in one.name]
    assert factors and {str(one.reason) for one in factors} <= {f"read as {key}" for key in used}


def test_factors_that_may_belong_to_either_side_are_not_applied_but_told() -> None:
    key = "conv.parametrizations.weight"
    kept = {f"{key}.original": torch.randn(4, 4, 3, 3), f"{key}.0.rows": 2 * torch.ones(4)}
    found = diagnose(kept)
    assert [row.name for row in found.matrices] == ["conv.weight"]
    (lost,) = found.failed
    assert lost.name == f"{key}.0.rows" and "of conv.weight that is not applied" in str(lost.reason)


def test_weights_of_other_parametrizations_are_left_as_they_are() -> None:
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4))
    found = diagnose(layer.state_dict())
    assert [row.name for row in found.matrices] == ["parametrizations.weight.original"]


# --- one bad part ---------------------------------------------------------------------------------


def test_130_equal_layers_in_a_chain_are_judged() -> None:
    layer = torch.randn(160, 160, generator=torch.Generator().manual_seed(0))
    found = diagnose({f"net.{k}.weight": layer.clone() for k in range(130)}, spectrum="none")
    assert not found.failed and len(found.analysed) == 130
    (chained,) = found.document()["chains"]
    assert chained["bound"] is None and chained["reasons"]["bound"] == "outside float64's range"


def test_a_projection_without_rows_costs_no_other_matrix() -> None:
    layer = nn.MultiheadAttention(16, 4)
    layer.in_proj_weight = nn.Parameter(torch.empty(0, 16))
    found = diagnose(layer)
    assert "out_proj.weight" in [row.name for row in found.analysed]
    assert not found.failed and not found.products


def test_an_empty_projection_beside_a_table_of_heads_is_no_head() -> None:
    names = [f"block.0.SelfAttention.{name}.weight" for name in "qkvo"]
    table = "block.0.SelfAttention.relative_attention_bias.weight"
    shapes = {**dict.fromkeys(names, (0, 8)), table: (32, 4), names[3]: (8, 0)}
    found = diagnose({name: torch.ones(shape) for name, shape in shapes.items()})
    assert table in [row.name for row in found.analysed]
    assert not found.products


@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
def test_heads_and_chains_of_any_scale_have_their_kappa(scale: float) -> None:
    torch.manual_seed(0)
    whole = nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2).double()})
    for name, count in (("two", 2), ("three", 3)):
        layers = (nn.Linear(8, 8, dtype=torch.float64) for _ in range(count))
        whole[name] = nn.Sequential(*layers)
    usual = diagnose(whole)
    for weight in whole.parameters():
        weight.data *= scale
    found = diagnose(whole)
    assert len(usual.products) == 4 and len(usual.chains) == 2 and not found.failed
    for one, other in zip(usual.products, found.products, strict=True):
        assert other.condition_number == pytest.approx(one.condition_number, rel=1e-9)
        told = product_document(other)
        outside = {"sigma_max": "outside float64's range", "sigma_min": "outside float64's range"}
        assert told["reasons"] == ({} if scale == 1 else outside)
        assert told["stable_rank"] == pytest.approx(product_document(one)["stable_rank"])
    for before, after in zip(usual.chains, found.chains, strict=True):
        assert after.condition_number == pytest.approx(before.condition_number, rel=1e-9)
        assert after.bound == pytest.approx(before.bound, rel=1e-9)


def test_a_module_on_the_meta_device_is_refused_as_model_and_as_reference() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    blank = copy.deepcopy(model).to("meta")
    told = r"4 of 4 parameters are on the meta device, without values.*load the weights first"
    for pair in ((blank,), (model, blank)):
        with pytest.raises(Refusal, match=told):
            diagnose(*pair)


def test_tensors_on_the_meta_device_cost_only_themselves() -> None:
    state = {"a.weight": torch.eye(3), "a.bias": torch.ones(3), "b.weight": torch.eye(3)}
    found = diagnose(state | {name: state[name].to("meta") for name in ("a.bias", "b.weight")})
    status = {row.name: row.status for row in found.matrices}
    assert status["a.weight"].startswith("ok") and "on meta is not" in status["b.weight"]


@pytest.mark.parametrize(("finder", "lost"), [("attention", "attention"), ("links", "chains")])
def test_an_error_while_layers_are_looked_for_costs_only_their_products(
    finder: str, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise IndexError("list index out of range")

    monkeypatch.setattr(diagnosing, finder, fails)
    found = diagnose({"fc1.weight": torch.eye(4), "fc2.weight": torch.eye(4)})
    assert [row.name for row in found.analysed] == ["fc1.weight", "fc2.weight"]
    assert bool(found.chains) == (finder == "attention")
    (failed,) = found.failed
    assert lost in failed.name
    assert str(failed.reason) == "not looked for: IndexError: list index out of range"


def test_odd_but_valid_models_are_answered(tmp_path: Path) -> None:
    """The short form of what benchmarks/fuzz.py does with thousands of them."""
    tally = odd_models.run("odd", odd_models.odd_models(28, seed=21), tmp_path)
    assert tally.crashes == []
    assert (tally.count, tally.accepted + tally.refused) == (28, 28) and tally.accepted > 20
