"""The help: every command and option is there, in plain words, with examples and exit codes."""

import re
import shlex

import pytest
import typer

from kappascope.cli import _help, app


def test_diagnose_comes_first_and_maintainers_last() -> None:
    page = _help.overview(app.panels(), app.COMMANDS)
    assert page.index("\n  diagnose ") < page.index("\nThe laboratory:")
    assert page.index("\nFor maintainers:") < page.index("\n  findings ") < page.index("\nOptions:")
    assert all(f"\n  {name} " in page for name in app.COMMANDS)


@pytest.mark.parametrize("name", app.COMMANDS)
def test_a_page_names_every_option_without_types_and_ends_with_exit_codes(name: str) -> None:
    page = _help.command_page(name, app.COMMANDS[name])
    command = typer.main.get_command(app.app).commands[name]  # type: ignore[attr-defined]
    options = [flag for parameter in command.params for flag in parameter.opts if flag[0] == "-"]
    named = set(re.findall(r"(?<=[ \n])--?[a-z-]+", page))
    assert [flag for flag in options if flag not in named] == []
    assert "<" not in page and page.startswith(f"Usage: kappascope {name} ")
    assert page.endswith(" ".join(_help.EXIT_CODES.split()[-2:]))


@pytest.mark.parametrize("name", app.COMMANDS)
def test_the_examples_of_a_page_are_taken(name: str) -> None:
    page = _help.command_page(name, app.COMMANDS[name])
    examples = [line for line in page.splitlines() if line.startswith(f"  kappascope {name}")]
    assert examples, f"{name} has no example"
    command = typer.main.get_command(app.app).commands[name]  # type: ignore[attr-defined]
    for line in examples:
        command.make_context(name, shlex.split(line)[2:])


@pytest.mark.parametrize("columns", ["20", "80", "200"])
def test_lines_fit_the_terminal(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    lines = _help.command_page("diagnose", app.COMMANDS["diagnose"]).splitlines()
    prose = [line for line in lines if not line.startswith(" ") and "Usage" not in line]
    assert max(map(len, prose)) <= min(int(columns), _help.WIDEST)


@pytest.mark.parametrize(
    "arguments", [["-h"], ["--help"], ["diagnose", "-h"], ["diagnose", "--help"]]
)
def test_both_spellings_ask_for_help(arguments: list[str], run) -> None:
    code, output, errors = run(*arguments)
    assert (code, errors) == (0, "") and output.startswith("Usage: kappascope ")
