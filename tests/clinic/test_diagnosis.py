"""The forms of a diagnosis: document, table and verdict, as they were in an earlier version."""

import csv
import html
import json
import math
import re
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

from kappascope.clinic import SCHEMA, blank_document
from kappascope.clinic.diagnose import diagnose
from kappascope.clinic.diagnosis import Diagnosis, document, joined, spreadsheet
from kappascope.clinic.examination import Examination, Finding
from kappascope.clinic.metrics import metric
from kappascope.system.files import strict
from small_checkpoints import KEPT, comparable, differences, documents

EARLIER = json.loads(Path(__file__).with_name("documents.json").read_text())


@pytest.fixture(scope="module")
def now() -> dict[str, object]:
    return {name: comparable(told) for name, told in documents(KEPT)}


@pytest.mark.parametrize("name", KEPT)
def test_a_document_is_what_it_was(name: str, now: dict[str, object]) -> None:
    assert list(differences(EARLIER[name], now[name], tolerance=1e-6)) == []


def test_every_difference_is_seen() -> None:
    old = {"a": 1.0, "b": ["x", None], "c": {"d": True}}
    assert not list(differences(old, {**old, "a": 1 + 1e-8}, 1e-6))
    changes = ({**old, "a": 1.1}, {**old, "b": ["x"]}, {**old, "b": ["y", None]}, {"a": 1.0},
               {**old, "c": {"d": 1}}, {"b": old["b"], "a": 1.0, "c": old["c"]})  # fmt: skip
    assert all(list(differences(old, new, 1e-6)) for new in changes)


# --- forms ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found() -> Diagnosis:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return diagnose(nn.Sequential(nn.Embedding(20, 16), model, nn.Linear(16, 20)).state_dict())


def test_the_document_is_strict_json_with_the_fields_of_its_schema(found: Diagnosis) -> None:
    told = json.loads(strict(found.document()))
    assert told["schema"] == SCHEMA == "kappascope.diagnosis/2"
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


@pytest.mark.parametrize(
    "name", ["=1+1", "+x", "-x", "@x", " =x", "\uff1dx", 'quote"d', "plain", "\u00e9"]
)
def test_no_name_is_a_formula_in_a_spreadsheet(name: str) -> None:
    import csv
    import io

    data = spreadsheet(diagnose({name: torch.eye(2)}).table()).decode()
    (row,) = csv.DictReader(io.StringIO(data, newline=""))
    assert row["name"].lstrip()[0] not in "=+-@\uff1d"
    assert row["name"].lstrip("'") == name


def test_numbers_of_any_size_come_back_from_every_table() -> None:
    """The faintest and the largest, what is infinite, and what is absent."""
    import io

    import pyarrow.parquet as pq

    eye = torch.eye(3, dtype=torch.float64)
    told = diagnose(
        {"faint": 1e-300 * eye, "large": 1e300 * eye, "flat": torch.ones(3, 3), "bad": eye / 0}
    )
    names = "frobenius_norm", "condition_number"
    as_json = {
        row["name"]: [row[name] for name in names]
        for row in json.loads(strict(document([told])))["matrices"]
    }
    assert as_json["faint"] == pytest.approx([3**0.5 * 1e-300, 1.0])
    assert as_json["large"] == pytest.approx([3**0.5 * 1e300, 1.0])
    assert as_json["flat"][1] is None and as_json["bad"] == [None, None]
    sink = io.BytesIO()
    pq.write_table(told.table(), sink)
    as_parquet = {
        row["name"]: [row[name] for name in names] for row in pq.read_table(sink).to_pylist()
    }
    rows = csv.DictReader(io.StringIO(spreadsheet(told.table()).decode()))
    as_csv = {row["name"]: [float(row[name]) if row[name] else None for name in names]
              for row in rows}  # fmt: skip
    assert as_csv == as_parquet
    finite = {
        name: [value if value is None or math.isfinite(value) else None for value in values]
        for name, values in as_parquet.items()
    }
    assert finite == as_json


def test_a_defect_is_in_the_verdict_though_it_is_only_a_note() -> None:
    noted = Finding("untrained", "info", "w", "as drawn", "", concern="defect")
    seen = Finding("unresolved", "info", "w", "open", "")
    row = Examination("w", (2, 2), "float32", "ok", condition_number=1.0, resolved=True)
    assert Diagnosis("x", (row,), findings=(seen,)).verdict[1] == (
        "No rule found anything wrong (1 note)."
    )
    assert Diagnosis("x", (row,), findings=(noted, seen)).verdict[1] == (
        "Findings: 2 notes; the worst is untrained in w."
    )


def test_every_number_of_a_convolution_has_a_column() -> None:
    kernel = torch.randn(16, 8, 3, 3, generator=torch.Generator().manual_seed(0))
    kernel[:, [2, 5]] = 0
    found = diagnose({"conv.weight": kernel}, reference={"conv.weight": kernel + 0.01})
    (row,) = csv.DictReader(spreadsheet(found.table()).decode().splitlines())
    assert row["taps"] == "3, 3" and row["lines.dead_columns"] == "2, 5"
    assert float(row["operator_norm.low"]) <= float(row["operator_norm.high"])
    assert 0 < float(row["int8.row_scale"]) < 0.1


def test_no_control_character_reaches_a_spreadsheet() -> None:
    odd = ["\tx", "\rx", "a\nb", "a\0b", "\x1b[31m", "\x85", "\u2028", "\u202e", "\r\n=1+1"]
    table = spreadsheet(diagnose({name: torch.eye(2 + i) for i, name in enumerate(odd)}).table())
    lines = table.decode().splitlines()
    assert len(lines) == 1 + len(odd) and all(line.isprintable() for line in lines)
    names = [line.split(",")[0].strip('"') for line in lines[1:]]
    assert len(set(names)) == len(odd) and not any(name.startswith("=") for name in names)


def test_several_diagnoses_are_a_trajectory(found: Diagnosis) -> None:
    told = document([found, found])
    assert [step["source"] for step in told["trajectory"]] == [found.source] * 2


def test_products_that_failed_say_so_of_every_number() -> None:
    model = nn.MultiheadAttention(4, 2)
    model.in_proj_weight.data[0] = math.nan
    failed = diagnose(model).document()["products"][0]
    names = "condition_number", "sigma_max", "sigma_min", "stable_rank"
    assert all(failed[name] is None and failed["reasons"][name] for name in names)
    model.in_proj_weight.data.zero_()
    zero = diagnose(model).document()["products"][0]
    assert zero["sigma_max"] == 0 and zero["reasons"].keys() == {"condition_number", "stable_rank"}


def test_a_diagnosis_is_printed_as_its_summary(found: Diagnosis) -> None:
    assert str(found).splitlines() == [f"Diagnosis of {found.source}", *found.verdict]


def test_a_step_that_is_ill_is_told_of_in_the_verdict_on_the_whole_way() -> None:
    ill, well = diagnose({"a.weight": torch.full((3, 3), math.nan)}), diagnose(nn.Linear(3, 3))
    told = document([ill, well])
    assert "in dict: 1 critical; the worst is non-finite in a.weight" in told["summary"]["verdict"]
    assert "Before" not in document([well, well])["summary"]["verdict"]
    assert told["trajectory"][0]["findings"][0]["rule"] == "non-finite"


def test_the_verdict_counts_in_words_that_fit() -> None:
    told = diagnose({"a.weight": torch.eye(3), "b.weight": torch.zeros(3, 3)}).verdict
    assert told[0] == "2 matrices were examined." and "1 matrix has none." in told[2]
    assert diagnose({"a.weight": torch.eye(3)}).verdict[0] == "1 matrix was examined."


def test_a_diagnosis_of_nothing_has_the_document_that_needs_no_torch() -> None:
    assert strict(blank_document("toy.pt")) == strict(Diagnosis("toy.pt").document())


def test_a_row_that_cannot_be_told_costs_no_other(
    found: Diagnosis, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, name = Examination.document, found.matrices[1].name

    def fails(row: Examination, plots: bool = False) -> dict[str, object]:
        return told(row, plots) if row.name != name else {}[name]

    monkeypatch.setattr(Examination, "document", fails)
    document = json.loads(strict(found.document()))
    names = [one["name"] for one in document["matrices"]]
    assert names == [row.name for row in found.matrices]
    assert document["failed"] == [{"name": name, "reason": document["failed"][0]["reason"]}]
    assert "KeyError" in document["matrices"][1]["status"]


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(16, 2, 32)


def test_in_a_notebook_the_page_has_a_frame_of_its_own() -> None:
    found = diagnose(small_model())
    framed = re.fullmatch(r'<iframe [^>]*srcdoc="([^"]*)"></iframe>', found._repr_html_())
    assert framed and html.unescape(framed[1]) == found.html()
    assert 'sandbox="allow-scripts"' in found._repr_html_()  # and not the origin of the notebook


def test_a_name_cannot_leave_the_frame() -> None:
    name = '"></iframe><script>alert(1)</script>'
    framed = diagnose({name: torch.eye(3)})._repr_html_()
    assert framed.count("<") == 2 and framed.count('"') == 8


def test_a_frame_and_an_arrow_stream_have_the_rows_of_the_table() -> None:
    found = diagnose(small_model())
    frame, stream = found.to_pandas(), pa.table(found)
    assert list(frame["name"]) == [row.name for row in found] == stream["name"].to_pylist()
    assert stream.equals(found.table())


def test_figures_are_axes_with_the_numbers_of_the_rows() -> None:
    found = diagnose(small_model())
    row = found["linear1"]
    assert row.name == "linear1.weight" and found["linear1.weight"] is row
    axes = found.plot_spectrum("linear1")
    curve = axes.get_lines()[0].get_xydata().tolist()
    assert curve == [list(point) for point in row.plot["spectrum"]]
    given = Figure().subplots()
    assert found.plot_map("stable", given) is given
    texts = [text.get_text() for text in given.texts]
    assert metric("stable").text(row) in texts and len(given.patches) == len(texts) > 3
    with pytest.raises(ValueError, match="expected one of chance"):
        found.plot_map("colour")
    with pytest.raises(KeyError, match=r"linear1\.weight"):
        found["linear3.weight"]
    with pytest.raises(ValueError, match="zero"):
        diagnose({"w": torch.zeros(3, 3)}).plot_spectrum("w")
