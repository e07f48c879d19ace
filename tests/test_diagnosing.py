"""Diagnosis of models and files: the same numbers by every road, and nothing lost on the way."""

import json
import math
import os
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import kappascope
from kappascope import corrections
from kappascope.chains import Chain
from kappascope.checkpoints import Exhausted
from kappascope.clinic import diagnosing, places
from kappascope.clinic.diagnosing import Choice, Weight, case, diagnose
from kappascope.clinic.diagnosis import SCHEMA, Diagnosis, document, joined, spreadsheet
from kappascope.matrices import Skipped, plan
from kappascope.refusals import Refusal
from kappascope.store import strict


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
    import kappascope.matrices  # what a user or a worker may well load

    assert dict(kappascope.matrices({"w": torch.eye(2)})).keys() == {"w"}
    from kappascope.matrices import plan

    assert callable(plan)


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
    assert Skipped("0.weight", "not chosen") in found.skipped
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
    assert back["0.weight"].reasons["errors"] == "not in the reference"


def test_what_is_not_finite_fails_alone() -> None:
    weights = {"a.weight": torch.randn(4, 4), "b.weight": torch.full((3, 3), math.nan)}
    found = diagnose(weights)
    assert [row.failed for row in found.matrices] == [False, True]
    assert found.failed == (Skipped("b.weight", "non-finite (9 of 9), first at [0, 0]"),)
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
        assert Skipped("0.bias", "one-dimensional") in found.skipped
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


def test_a_vector_that_cannot_be_read_is_lost_and_the_others_are_not() -> None:
    def read(path: tuple[str, ...]) -> torch.Tensor:
        if path == ("a",):
            raise Refusal(2, "x.pt", "truncated", "download it again")
        return torch.tensor([math.nan])

    opened = places.Opened(plan({}), read, vectors={"a": ("a",), "b": ("b",)})
    assert list(opened.unsound()) == [
        Skipped("a", "cannot be read: truncated"),
        Skipped("b", "non-finite (1 of 1), first at [0]"),
    ]


def test_a_chain_that_fails_is_among_what_failed_and_one_left_out_is_not() -> None:
    torch.manual_seed(0)
    huge = 1e307 * torch.randn(4, 4, dtype=torch.float64)  # their product overflows
    found = diagnose({"fc1.weight": huge, "fc2.weight": huge.clone()})
    assert found.failed == (Skipped("fc1.weight > fc2.weight", "non-finite"),)
    left_out = Chain("a > b", ("a", "b"), (9, 9, 9), None, False, None, "skipped: too wide")
    assert Diagnosis("toy", chains=(left_out,)).failed == ()


@pytest.mark.parametrize("name", ["missing", "empty.pt", "text.safetensors", "a\0b"])
def test_what_is_no_checkpoint_is_refused(name: str, tmp_path: Path) -> None:
    if name != "missing" and "\0" not in name:
        (tmp_path / name).write_bytes(b"" if "empty" in name else b"<html>no</html>")
    with pytest.raises(Refusal) as refusal:
        diagnose(tmp_path / name)
    assert refusal.value.code == 2


def _dies(model: object) -> None:
    os.abort()


def _hangs(model: object) -> None:
    import time

    time.sleep(600)


def _hoards(model: object) -> None:
    torch.ones(2**31)


@pytest.mark.parametrize(
    ("deed", "code", "words"),
    [(_dies, 2, "SIGABRT"), (_hangs, 5, "more than 1 s"), (_hoards, 2, "too much memory")],
)
def test_a_file_that_harms_its_reader_ends_in_one_line(
    deed, code, words, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosing.Summary, "of", deed)
    # a busy machine takes its time to get as far as the deed
    monkeypatch.setattr(places.File, "patience", 1.0 if deed is _hangs else 60.0)
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


ENOMEM = "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError(ENOMEM), Exhausted(5, "x.pt", "too large", "buy more")]
)
def test_too_little_memory_is_known_by_its_type_from_any_process(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise pickle.loads(pickle.dumps(error))

    monkeypatch.setattr(diagnosing, "examine", fails)
    (failed,) = diagnose({"w": torch.eye(2)}).failed
    assert failed == Skipped("w", "more memory needed than a worker may use")


def test_an_error_that_only_speaks_of_memory_is_told_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object) -> None:
        raise ValueError("not enough memory in the title")

    monkeypatch.setattr(diagnosing, "examine", fails)
    (failed,) = diagnose({"w": torch.eye(2)}).failed
    assert failed.reason == "ValueError: not enough memory in the title"


def test_efforts_are_ordered_largest_first(saved: Path) -> None:
    efforts = [task.effort for task in case(saved).tasks]
    assert efforts == sorted(efforts, reverse=True)
    assert any(isinstance(task, Weight) for task in case(saved).tasks)


def test_the_document_is_strict_json_with_the_fields_of_its_schema(found: Diagnosis) -> None:
    told = json.loads(strict(found.document()))
    assert told["schema"] == SCHEMA == "kappascope.diagnosis/1"
    assert {"source", "matrices", "skipped", "summary", "provenance"} <= set(told)
    fields = """name shape dtype status row_norms column_norms sigma_max sigma_2 sigma_min
        condition_number condition_number_low condition_number_high resolved effective_rank
        stable_rank spectral_gap frobenius_norm null_z alpha findings"""
    for matrix in told["matrices"]:
        assert set(fields.split()) <= set(matrix)
        assert "plot" not in matrix and "errors" not in matrix
        assert set(matrix["row_norms"]) == {"min", "median", "max", "cv"}
    assert "plot" in found.document(plots=True)["matrices"][0]


def test_the_document_has_every_finding_and_each_matrix_its_own(found: Diagnosis) -> None:
    told = found.document()
    assert [one["subject"] for one in told["findings"]] == [one.subject for one in found.findings]
    names = {row.name for row in found.matrices}
    own = [one for matrix in told["matrices"] for one in matrix["findings"]]
    assert own and all(one in told["findings"] for one in own)
    assert len(own) == sum(one["subject"] in names for one in told["findings"])


def test_the_worst_that_is_named_is_the_first_of_the_table() -> None:
    values = torch.ones(40, dtype=torch.float64)
    weights = {}
    for name, smallest in (("a", 1e-5), ("b", 1e-9), ("c", 1e-7)):
        values[-1] = smallest
        weights[f"{name}.weight"] = 2 * torch.diag(values).flip(0)
    found = diagnose(weights)
    assert [row.name for row in found.ranked] == ["b.weight", "c.weight", "a.weight"]
    assert found.findings[0].subject == "b.weight"
    assert f"the worst is {found.findings[0].rule} in b.weight" in str(found)


def test_an_infinite_kappa_is_null_with_a_reason() -> None:
    (row,) = diagnose({"w": torch.ones(3, 3)}).document()["matrices"]
    assert row["condition_number"] is None and "infinite" in row["reasons"]["condition_number"]
    json.dumps(row, allow_nan=False)


def test_the_table_has_one_row_for_every_matrix(found: Diagnosis) -> None:
    table = found.table()
    assert table.num_rows == len(found.matrices)
    assert table["row_norms.cv"].null_count == 0
    assert joined([found, found]).num_rows == 2 * table.num_rows


@pytest.mark.parametrize("name", ["two\nlines", ""])
def test_any_name_has_its_row(name: str) -> None:
    assert diagnose({name: torch.eye(2)}).table()["name"].to_pylist() == [name]


def test_a_diagnosis_without_findings_has_no_ills() -> None:
    assert Diagnosis("toy.pt").ills == "none."


def test_a_tensor_of_the_reference_is_read_once_for_all_its_parts(monkeypatch) -> None:
    reads, original = [], places.Opened.matrices
    monkeypatch.setattr(
        places.Opened, "matrices", lambda self, names: reads.append(1) or original(self, names)
    )
    stack = {"experts.w": torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(0))}
    found = diagnose(stack, reference=stack)
    parts = [row for row in found.matrices if row.errors is not None]
    assert len(parts) >= 5 and len(reads) == 1


@pytest.mark.parametrize("name", ["=1+1", "+x", "-x", "@x", "\tx", "\rx", 'quote"d', "plain"])
def test_no_name_is_a_formula_in_a_spreadsheet(name: str) -> None:
    import csv
    import io

    data = spreadsheet(diagnose({name: torch.eye(2)}).table()).decode()
    (row,) = csv.DictReader(io.StringIO(data, newline=""))
    assert row["name"][0] not in "=+-@\t\r"
    assert row["name"].lstrip("'") == name


def test_several_diagnoses_are_a_trajectory(found: Diagnosis) -> None:
    told = document([found, found])
    assert [step["source"] for step in told["trajectory"]] == [found.source] * 2


def test_patterns_are_parts_or_shell_patterns() -> None:
    choice = Choice(include=("layers.*.weight",), exclude=("embed",))
    assert choice.takes("layers.0.weight") and not choice.takes("layers.0.bias")
    assert not choice.takes("layers.embed.weight")


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
    monkeypatch.setattr("kappascope.spectra.singular_values", lambda matrix: pytest.fail("again"))
    (row,) = diagnose({"w": torch.eye(4)}, {"w": torch.eye(4)}, spectrum="none").matrices
    assert row.errors["condition_number"] == 0.0


def test_products_that_failed_say_so_of_every_number() -> None:
    model = nn.MultiheadAttention(4, 2)
    model.in_proj_weight.data[0] = math.nan
    failed = diagnose(model).document()["products"][0]
    names = "condition_number", "sigma_max", "sigma_min", "stable_rank"
    assert all(failed[name] is None and failed["reasons"][name] for name in names)
    model.in_proj_weight.data.zero_()
    zero = diagnose(model).document()["products"][0]
    assert zero["sigma_max"] == 0 and zero["reasons"].keys() == {"condition_number", "stable_rank"}


def test_why_a_tensor_cannot_be_read_is_told_once(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"w": torch.ones(8, 8)}, path)
    data = path.read_bytes()
    path.write_bytes(data.replace(torch.ones(8, 8).numpy().tobytes(), bytes(256)))
    (lost,) = diagnose(path, jobs=1).failed
    assert lost.reason == "damaged: the checksum of its content is another"
    torch.save({"w": torch.ones(8, 8)}, tmp_path / "y.pt")
    (lost,) = diagnose(tmp_path / "y.pt", path, jobs=1).failed
    assert lost.reason.startswith(f"{path}: damaged") and "(" not in lost.reason


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


def test_a_model_in_memory_is_looked_over_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    monkeypatch.setattr(places, "plan", lambda model: looks.append(1) or plan(model))
    weights = {f"{k}.weight": torch.eye(3) for k in range(9)}
    assert len(diagnose(weights, reference=weights).analysed) == 9
    assert len(looks) == 2


class Elsewhere(torch.Tensor):
    """Of a device from which numbers must be brought before they can be used."""

    def cpu(self) -> torch.Tensor:
        return torch.diag(torch.arange(1.0, self.shape[0] + 1))


def test_a_model_on_any_device_is_examined_with_its_products_and_reference() -> None:
    blank = [torch.empty(4, 4, device="meta").as_subclass(Elsewhere) for _ in range(2)]
    found = diagnose(dict(zip(("fc1.weight", "fc2.weight"), blank, strict=True)),
                     reference={"fc1.weight": torch.eye(4)})  # fmt: skip
    assert not found.failed
    assert [row.condition_number for row in found.matrices] == [4.0, 4.0]
    assert found.matrices[0].errors["condition_number"] == pytest.approx(3.0)
    assert found.chains[0].condition_number == pytest.approx(16.0)


def test_a_file_is_parsed_in_other_processes_whichever_side_it_is(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = model()
    weights.register_forward_hook(lambda *_: None)  # cannot be pickled, and need not be
    monkeypatch.setattr(places.checkpoints, "open", lambda _: pytest.fail("parsed here"))
    for found in (diagnose(weights, saved, jobs=1), diagnose(saved, weights, jobs=1)):
        assert found.matrices and not found.failed
        assert all(row.errors["overall_matrix"] == 0 for row in found.matrices)


def test_what_is_sent_to_a_process_is_no_more_than_a_task_needs() -> None:
    flat = torch.zeros(2**20)
    weights = {f"{k}.weight": flat[9 * k : 9 * k + 9].view(3, 3) for k in range(9)}
    assert len(pickle.dumps(places.Memory(weights).portion(["0.weight"]))) < 10_000


@pytest.mark.parametrize("name", ["Multipliers", "Hybrid", "SingularValueMultipliers"])
def test_a_checkpoint_of_a_model_under_correction_is_read_as_its_layers_use_it(
    name: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 9), nn.Unflatten(1, (1, 9)), nn.Conv1d(1, 4, 3), nn.Flatten(),
                        nn.Linear(28, 28), nn.ReLU(), nn.Linear(28, 5))  # fmt: skip
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    getattr(corrections, name)().attach(net, optimizer)
    for _ in range(9):
        optimizer.zero_grad()
        net(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
    torch.save({"model": net.state_dict()}, tmp_path / "x.pt")
    used = {f"{k}.weight": net[k].weight.detach() for k in (0, 2, 4, 6)}
    original = net[0].parametrizations.weight.original
    assert not torch.allclose(used["0.weight"], original, rtol=1e-5)
    found, there = diagnose(tmp_path / "x.pt", used, jobs=1), diagnose(net.state_dict())
    assert [row.name for row in found.matrices] == list(used)
    assert all(row.errors["overall_matrix"] < 1e-6 for row in found.matrices)
    assert found.matrices[0].sigma_min == there.matrices[0].sigma_min
    factors = [one for one in found.skipped if ".weight.0." in one.name]
    assert factors and {one.reason for one in factors} <= {f"read as {key}" for key in used}


def test_factors_that_may_belong_to_either_side_are_not_applied_but_told() -> None:
    key = "conv.parametrizations.weight"
    kept = {f"{key}.original": torch.randn(4, 4, 3, 3), f"{key}.0.rows": 2 * torch.ones(4)}
    found = diagnose(kept)
    assert [row.name for row in found.matrices] == ["conv.weight"]
    (lost,) = found.failed
    assert lost.name == f"{key}.0.rows" and "of conv.weight that is not applied" in lost.reason


def test_weights_of_other_parametrizations_are_left_as_they_are() -> None:
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4))
    found = diagnose(layer.state_dict())
    assert [row.name for row in found.matrices] == ["parametrizations.weight.original"]


def test_a_diagnosis_is_printed_as_its_summary(found: Diagnosis) -> None:
    assert str(found).splitlines() == [f"Diagnosis of {found.source}", *found.verdict]


def test_a_step_that_is_ill_is_told_of_in_the_verdict_on_the_whole_way() -> None:
    ill, well = diagnose({"a.weight": torch.full((3, 3), math.nan)}), diagnose(nn.Linear(3, 3))
    told = document([ill, well])
    assert "in dict: 1 critical; the worst is non-finite in a.weight" in told["summary"]["verdict"]
    assert "Before" not in document([well, well])["summary"]["verdict"]
    assert told["trajectory"][0]["findings"][0]["rule"] == "non-finite"


@pytest.mark.parametrize("source", [3, None, torch.eye(2), [1]])
def test_what_is_no_model_is_named(source: object) -> None:
    with pytest.raises(TypeError, match=r"expected a path, an nn\.Module or a mapping"):
        diagnose(source)
