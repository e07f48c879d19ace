"""What the documents tell a reader to type works, and what they list is all there is."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import kappascope
from checkpoint_files import safetensors
from kappascope import corrections
from kappascope.clinic.judgement import rule_names

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


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


def test_the_counts_in_the_readme_are_those_of_the_findings() -> None:
    findings, readme = ((ROOT / page).read_text() for page in ("docs/findings.md", "README.md"))
    counts = re.search(
        r"The paper: Of (\d+) claims, (\d+) hold, (\d+) fail, (\d+) are und", findings
    )
    assert counts
    told = "Of the paper's {} claims {} hold, {} fail, {} are undecided and".format(
        *counts.groups()
    )
    assert told in " ".join(readme.split())


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
