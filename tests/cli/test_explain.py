"""The command explain: every rule tells its reasons, and others are refused."""

from kappascope.cli.app import run
from kappascope.clinic.judgement import rule_names


def test_every_rule_is_listed_and_explained(capsys) -> None:
    assert run(["explain"]) == 0
    listed = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == list(rule_names())
    assert run(["explain", *listed]) == 0
    assert "never received a gradient" in capsys.readouterr().out


def test_an_unknown_rule_is_refused_with_those_there_are(capsys) -> None:
    assert run(["explain", "exploding"]) == 4
    assert "stretched-product" in capsys.readouterr().err
