"""The help of the command and of each subcommand, written from signatures and docstrings.

typer's own help is not used: it names a type behind every flag, draws frames around all and differs
from release to release.
"""

from __future__ import annotations

import inspect
import shutil
import textwrap
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

WIDEST = 100  # characters of a line: longer ones are hard to read
GAP = 2  # spaces between a name and what is said of it
NAMES_UP_TO = 26  # characters of the column of names; a longer name has a line of its own
NAMED_TYPES = {int: "N", float: "X", str: "TEXT", Path: "PATH"}
COMMON = {
    "-v, --verbose": "Say on the error output what is being done.",
    "-h, --help": "Show this page.",
}
EXIT_CODES = (
    "0 done; 1 done, but results differ or findings are severe; 2 input refused; 3 done in part; "
    "4 wrong usage; 5 no room, memory or library; 130 and 143 interrupted."
)


def overview(
    panels: Mapping[str, Sequence[str]], commands: Mapping[str, Callable[..., Any]]
) -> str:
    """Write the page of the command itself: its subcommands by what they are for."""
    parts = [
        "Usage: kappascope COMMAND ...",
        filled("Look into the weight matrices of neural networks."),
    ]
    for title, names in panels.items():
        rows = {name: _paragraphs(commands[name])[0].rstrip(".") for name in names}
        parts.append(_panel(title, rows))
    parts.append(_panel("Options", {"--version": "Show the version.", **_COMPLETION, **COMMON}))
    parts.append(filled("`kappascope COMMAND -h` explains a command. Try first:"))
    parts.append("  kappascope diagnose model.safetensors")
    return "\n\n".join(parts)


_COMPLETION = {
    "--install-completion": "Complete commands and options in this shell.",
    "--show-completion": "Show what that would install.",
}


def command_page(name: str, command: Callable[..., Any]) -> str:
    """Write the page of one subcommand."""
    arguments, options = _parameters(command)
    usage = " ".join(["Usage: kappascope", name, *arguments, "[OPTIONS]"])
    parts = [usage, *(filled(paragraph) for paragraph in _paragraphs(command))]
    if arguments:
        parts.append(
            _panel("Arguments", {key.strip("[]"): said for key, said in arguments.items()})
        )
    parts.append(
        _panel("Options", options | {k: said for k, said in COMMON.items() if k not in options})
    )
    parts.append(filled(f"Exit codes: {EXIT_CODES}"))
    return "\n\n".join(parts)


def _parameters(command: Callable[..., Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Name each argument and option as it is typed, with what its author says of it."""
    hints = get_type_hints(command, include_extras=True)
    arguments, options = {}, {}
    for name, parameter in inspect.signature(command).parameters.items():
        kind, info = _declared(hints[name])
        # typer keeps the first name in the place of the default, which Annotated has no use for
        declared = [text for text in (info.default, *(info.param_decls or ())) if _is_name(text)]
        said = info.help or ""
        if type(info).__name__ == "ArgumentInfo":
            shown = info.metavar or name.upper()
            needed = parameter.default is parameter.empty
            arguments[shown if needed or shown.startswith("[") else f"[{shown}]"] = said
            continue
        flag = ", ".join(declared) or f"--{name.replace('_', '-')}"
        value = "" if kind is bool else info.metavar or _value(kind)
        default = parameter.default
        if default not in (None, False, parameter.empty):
            said = f"{said} (default: {default})"
        options[f"{flag} {value}".strip()] = said
    return arguments, options


def _is_name(text: object) -> bool:
    return isinstance(text, str) and text.startswith("-")


def _declared(hint: Any) -> tuple[Any, Any]:
    """Take an annotation apart into the type and typer's description."""
    if get_origin(hint) is not Annotated:
        raise TypeError(f"expected Annotated[type, typer.Option(...)], got {hint}")
    kind, info = get_args(hint)[:2]
    if get_origin(kind) in (Union, types.UnionType):  # it may be left out
        kind = next(each for each in get_args(kind) if each is not type(None))
    return kind, info


def _value(kind: Any) -> str:
    """Name what an option takes.

    >>> _value(Literal["auto", "full"]), _value(int), _value(list[str])
    ('auto|full', 'N', 'TEXT')
    """
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    if get_origin(kind) is list:
        return _value(get_args(kind)[0])
    return NAMED_TYPES.get(kind, "VALUE")


def _paragraphs(command: Callable[..., Any]) -> list[str]:
    return inspect.cleandoc(command.__doc__ or command.__name__).split("\n\n")


def _width() -> int:
    return min(WIDEST, shutil.get_terminal_size().columns)


def filled(paragraph: str) -> str:
    """Break lines to fit; indented ones are commands and stay as they are."""
    lines = paragraph.splitlines()
    plain = [line for line in lines if not line.startswith(" ")]
    text = textwrap.fill(" ".join(plain), max(_width(), 20), break_on_hyphens=False)
    return "\n".join([text, *(line for line in lines if line.startswith(" "))])


def _panel(title: str, rows: Mapping[str, str]) -> str:
    """Write names and what is said of them in two columns under a title."""
    column = GAP + min(NAMES_UP_TO, max(map(len, rows))) + GAP
    room = max(_width() - column, 20)
    lines = [f"{title}:"]
    for name, said in rows.items():
        start = f"{' ' * GAP}{name}"
        wrapped = textwrap.wrap(said, room, break_on_hyphens=False) or [""]
        if len(start) + GAP > column:
            lines.append(start)
            start = ""
        lines.append(f"{start:<{column}}{wrapped[0]}".rstrip())
        lines += [" " * column + line for line in wrapped[1:]]
    return "\n".join(lines)
