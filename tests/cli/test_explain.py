"""The command explain: every rule tells its reasons, and others are refused."""

from importlib.metadata import EntryPoint

import pytest

from kappascope.cli.app import run
from kappascope.clinic.judgement import rule_names
from kappascope.clinic.symptoms import RULES
from kappascope.system import extras


def test_every_rule_is_listed_and_explained(capsys) -> None:
    assert run(["explain"]) == 0
    first_words = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert [word for word in first_words if word in rule_names()] == list(rule_names())
    assert run(["explain", *rule_names()]) == 0
    assert "never received a gradient" in capsys.readouterr().out


def test_an_unknown_rule_is_refused_with_those_near_it(capsys) -> None:
    assert run(["explain", "streched-products"]) == 4
    told = capsys.readouterr().err
    assert "near it: stretched-product" in told and "`kappascope explain` lists them" in told
    assert run(["explain", "xyz"]) == 4
    assert "near" not in capsys.readouterr().err
    assert run(["explain"]) == 0
    assert "stretched-product" in capsys.readouterr().out


def test_a_rule_of_a_plug_in_is_listed_and_explained(
    capsys: pytest.CaptureFixture[str], tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plugged_rules.py").write_text("""
from kappascope.clinic.symptoms import rule

@rule("harm")
def rows_of_others(matrix, model):
    \"\"\"Rows that only this package knows.\"\"\"
""")
    monkeypatch.syspath_prepend(tmp_path)
    entry = EntryPoint("rows-of-others", "plugged_rules:rows_of_others", "kappascope.rules")
    monkeypatch.setattr(extras, "entry_points", lambda group: [entry] if "rules" in group else [])
    extras.plugins.cache_clear()
    try:
        assert run(["explain", "rows-of-others"]) == 0
        assert "Rows that only this package knows." in capsys.readouterr().out
        assert run(["explain"]) == 0
        listed = " ".join(capsys.readouterr().out.split())
        assert "rows-of-others harm Rows that only this package knows." in listed
        assert run(["doctor"]) == 0
        assert "plugged_rules:rows_of_others" in capsys.readouterr().out
    finally:
        RULES.pop("rows-of-others", None)
        extras.plugins.cache_clear()


def test_an_explanation_fits_the_terminal(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert run(["explain", *rule_names()]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 60
