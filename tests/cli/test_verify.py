"""``kappascope verify``: the same bits again."""

from pathlib import Path

from tiny_experiments import TOY
from tiny_runs import complete


def test_verify_finds_the_same_bits(run, tmp_path: Path) -> None:
    complete(TOY, tmp_path)
    code, output, errors = run("verify", tmp_path, "--trials", 3)
    assert (code, errors) == (0, "")
    assert output.count("same") == 3
