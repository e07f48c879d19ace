"""What the documents tell a reader to type works, and what they list is all there is."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import kappascope
from checkpoint_files import safetensors
from kappascope import corrections
from kappascope.clinic.judgement import rule_names
from kappascope.paper.review import all_claims

ROOT = Path(__file__).parents[1]
RESULTS = [ROOT / "results" / "paper", *sorted((ROOT / "results" / "studies").glob("*/"))]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def committed_claims() -> list[dict[str, Any]]:
    """The verdicts on the rows in results/."""
    files = [folder / "verdicts.json" for folder in RESULTS if folder.exists()]
    return [claim for file in files for claim in json.loads(file.read_bytes())["claims"]]


def snippets(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


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
def test_links_lead_somewhere(page) -> None:
    links = re.findall(r"\]\(([^)#]+?)\)", page.read_text())
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_every_correction_is_told_of() -> None:
    told = (ROOT / "docs" / "corrections.md").read_text(), (ROOT / "README.md").read_text()
    members = [member.__name__ for member in corrections.Correction.__subclasses__()]
    assert "Multipliers" in members
    assert all(f"`{name}`" in page for name in members for page in told)


def test_what_pages_say_of_claims_is_what_rows_say() -> None:
    verdicts = {claim["id"]: claim["verdict"] for claim in committed_claims()}
    for page in PAGES:
        text = " ".join(page.read_text().split())
        said = re.findall(r"`([a-z]\w*\.[\w-]+)` (holds|fails|is undecided|is ill-posed)", text)
        stale = [
            (name, word) for name, word in said if verdicts.get(name, word) != word.split()[-1]
        ]
        assert not stale, f"{page.name} says {stale}"


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
