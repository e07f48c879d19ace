"""The command explain: every rule tells its reasons, and others are refused."""

from kappascope.cli.app import run
from kappascope.clinic.judgement import rule_names


def test_every_rule_is_listed_and_explained(capsys) -> None:
    assert run(["explain"]) == 0
    listed = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == list(rule_names())
    assert run(["explain", *listed]) == 0
    assert "never received a gradient" in capsys.readouterr().out


def test_an_unknown_rule_is_refused_with_those_near_it(capsys) -> None:
    assert run(["explain", "streched-products"]) == 4
    told = capsys.readouterr().err
    assert "near it: stretched-product" in told and "`kappascope explain` lists them" in told
    assert run(["explain", "xyz"]) == 4
    assert "near" not in capsys.readouterr().err
    assert run(["explain"]) == 0
    assert "stretched-product" in capsys.readouterr().out
