"""What the documents tell a reader to type works, and what they list is all there is."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import nn

import kappascope
from checkpoint_files import safetensors
from kappascope import corrections
from kappascope.cli import app
from kappascope.clinic.judgement import rule_names
from kappascope.lab import downloads
from kappascope.lab.article import fill_article
from kappascope.lab.experiment import studies
from kappascope.paper.review import all_claims

ROOT = Path(__file__).parents[1]
RESULTS = [ROOT / "results" / "reproduce", *sorted((ROOT / "results" / "studies").glob("*/"))]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DIAGNOSE = ["kappascope", "diagnose"]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: object) -> tuple[int, str, str]:
        code = app.run([str(argument) for argument in arguments])
        return (code, *capfd.readouterr())

    return run


def committed_claims() -> list[dict[str, Any]]:
    """The verdicts on the rows in results/."""
    files = [folder / "verdicts.json" for folder in RESULTS if folder.exists()]
    return [claim for file in files for claim in json.loads(file.read_bytes())["claims"]]


def snippets(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def typed(page: Path) -> list[list[str]]:
    """What a page tells a reader to type into a shell, without comments, as words."""
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if snippets(page)], ids=lambda page: page.stem
)
def test_snippets_run_in_order(page, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 8))
    Path("model.safetensors").write_bytes(safetensors(model.state_dict()))
    names = {
        "torch": torch,
        "kappascope": kappascope,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
    }
    for snippet in snippets(page):
        exec(snippet, names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_that_is_printed_is_one_the_command_takes(page) -> None:
    command = typer.main.get_command(app.app)
    for words in typed(page):
        summary = any(word.startswith("[") for word in words)  # of usage, not a line to type
        if words[0] == "kappascope" and not summary:
            name, *arguments = words[1:]
            if not name.startswith("-"):
                command.commands[name].make_context(name, arguments)
        if words[0] == "make":
            assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text()
        if words[0] == "python" and words[1].endswith(".py"):
            assert (ROOT / words[1]).exists()


def test_the_readme_diagnoses_checkpoints_as_printed(run, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    for place in ("model.safetensors", "tuned/model.safetensors", "base/model.safetensors"):
        Path(place).parent.mkdir(exist_ok=True)
        Path(place).write_bytes(safetensors({"layer.weight": torch.randn(32, 16)}))
    for name in ("model", "step100", "step200", "step300"):
        torch.save({"layer.weight": torch.randn(32, 16)}, f"{name}.pt")
    commands = [words[1:] for words in typed(ROOT / "README.md") if words[:2] == DIAGNOSE]
    ours = [words for words in commands if "demo/" not in words[1]]
    assert len(ours) == 4
    for words in ours:
        code, output, errors = run(*words)
        assert (code, errors) == (0, "") and output


def test_the_demo_prints_what_the_readme_says(run, monkeypatch) -> None:
    try:
        albert = downloads.path("albert")
    except kappascope.Refusal as refusal:
        pytest.skip(str(refusal))
    monkeypatch.setenv("COLUMNS", "80")
    code, output, errors = run("diagnose", albert)
    readme = (ROOT / "README.md").read_text()
    (printed,) = re.findall(r"in part:\n\n```\n(.*?)```", readme, re.DOTALL)
    there = {line.strip() for line in output.splitlines()}
    assert code == 0, errors  # which has progress where two seconds do not do
    assert [line for line in printed.splitlines() if line.strip() not in there] == []


def test_the_figures_of_the_readme_are_those_that_were_measured() -> None:
    def measured(name: str) -> Any:
        return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_bytes())

    (large,) = [row for row in measured("vitals")["seconds"] if row["size"] == 4096]
    float32, float64 = large["torch svdvals float32"], large["torch svdvals float64"]
    alpha, monitor, peers = measured("alpha")["summary"], measured("monitor"), measured("peers")
    read = {name: list(found.values()).count("yes") for name, found in peers["formats"].items()}
    swallowed = monitor["swallowed"]
    lost = [
        100 * swallowed[dtype]["mean observed share"]
        for dtype in ("bfloat16", "bfloat16 with float32 masters")
    ]
    stall = monitor["failures"]["by kind"]["bf16 stall"]
    assert stall["runs"] == stall["announced"]
    assert {len(found) for found in peers["formats"].values()} == {8}
    said = (
        f"| {large['vitals']:.1f} s | {float32:.1f} s (float32), {float64:.1f} s (float64)"
        f" | {large['WeightWatcher analyze']:.1f} s |",
        f"in {alpha['good fits that agree']} of {alpha['good fits']} good fits",
        f"| reads {read['kappascope']} | – | reads {read['WeightWatcher']} | – "
        f"| shows {read['Netron']} |",
        f"**{lost[0]:.0f} %** of its entries' updates to rounding, with float32 master weights "
        f"{lost[1]:.2f} %",
        f"in all {stall['runs']} runs that stalled, in the median "
        f"{stall['median lead, steps']} steps before",
        *(f"{peer} {peers['versions'][package].rpartition('.')[0]}"
          for peer, package in (("Netron", "netron"), ("`wandb.watch`", "wandb"))),
    )  # fmt: skip
    readme = (ROOT / "README.md").read_text()
    assert [words for words in said if words not in readme] == []
    block = measured("diagnose")
    said = (
        f"svdvals` takes {float32:.1f} s in float32 and {float64:.1f} s in float64",
        f"in {large['vitals']:.1f} s and all singular values in {large['spectrum']:.1f} s",
        f"take {block['in memory']['none']:.0f} s of CPU time, and "
        f"{block['in memory']['full']:.0f} s with all singular values",
        f"WeightWatcher takes {block['weightwatcher']:.0f} s",
    )
    spectra = " ".join((ROOT / "docs" / "spectra.md").read_text().split())
    assert [words for words in said if words not in spectra] == []


def test_the_readme_is_a_screen_and_a_half() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page) -> None:
    links = re.findall(r"\]\(([^)#]+?)\)", page.read_text())
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_every_correction_is_told_of() -> None:
    told = (ROOT / "docs" / "corrections.md").read_text()
    members = [member.__name__ for member in corrections.Correction.__subclasses__()]
    assert "Multipliers" in members
    assert [name for name in members if f"`{name}`" not in told] == []


def test_what_pages_say_of_claims_is_what_rows_say() -> None:
    verdicts = {claim["id"]: claim["verdict"] for claim in committed_claims()}
    for page in PAGES:
        text = " ".join(page.read_text().split())
        said = re.findall(r"`([a-z]\w*\.[\w-]+)` (holds|fails|is undecided|is ill-posed)", text)
        stale = [
            (name, word) for name, word in said if verdicts.get(name, word) != word.split()[-1]
        ]
        assert not stale, f"{page.name} says {stale}"


def test_every_study_tells_what_it_found() -> None:
    claims = committed_claims()
    told = {name: fill_article(study.finding, claims) for name, study in studies().items()}
    assert {name: each.left_out for name, each in told.items() if each.left_out} == {}
    page = (ROOT / "docs" / "studies.md").read_text()
    assert [name for name, each in told.items() if not each.text or each.text not in page] == []


def test_numbers_of_the_open_question_are_those_of_its_rows() -> None:
    """What the page says with an interval stands in the page that is written from the rows."""
    page, written = (
        (ROOT / "docs" / name).read_text() for name in ("open-question.md", "studies.md")
    )
    number = r"[+-]?\d+\.\d+"
    said = re.findall(rf"{number} \[{number}, {number}\]", page)
    assert len(said) > 100
    assert [each for each in said if each not in written] == []
    headers = set(re.findall(r"^(\|.*\|)\n\|---", written, re.MULTILINE))
    tables = re.findall(r"^(\|.*\|)\n\|[-|]+\|\n((?:\|.*\|\n)+)", page, re.MULTILINE)
    copied = [rows for header, rows in tables if header in headers]
    assert len(copied) >= 5
    lines = set(written.splitlines())
    assert [line for rows in copied for line in rows.splitlines() if line not in lines] == []


def test_pages_name_claims_that_there_are() -> None:
    verdicts = {claim.id for claim in all_claims()}
    kinds = {name.split(".")[0] for name in verdicts}
    for page in PAGES:
        named = set(re.findall(r"`([a-z]\w*\.[a-z][a-z0-9-]*)`", page.read_text()))
        claims = {name for name in named if name.split(".")[0] in kinds and "-" in name}
        assert claims <= verdicts, f"{page.name} names {claims - verdicts}"


def test_every_file_that_is_named_is_there() -> None:
    here = ROOT, ROOT / "src" / "kappascope"
    for page in (*PAGES, ROOT / "CONTRIBUTING.md"):
        named = re.findall(r"`([\w/]+/(?:\w+\.\w+)?)`", page.read_text())
        gone = [name for name in named if not any((root / name).exists() for root in here)]
        assert not gone, f"{page.name} names {gone}"


def test_every_folder_is_on_the_list() -> None:
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    folders = [path.parent.name for path in (ROOT / "src/kappascope").glob("*/__init__.py")]
    assert [name for name in folders if f"| `{name}` |" not in contributing] == []


def test_every_rule_is_explained() -> None:
    told = (ROOT / "docs" / "diagnose.md").read_text()
    assert [name for name in rule_names() if f"`{name}`" not in told] == []
