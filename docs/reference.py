"""Write docs/reference.md from the docstrings of the public names.

    python docs/reference.py

A test compares the page with what this script would write.
"""

import inspect
import re
from pathlib import Path
from typing import Any

import kappascope
from kappascope import corrections

PAGE = Path(__file__).with_name("reference.md")


def entry(name: str, thing: Any) -> str:
    """Describe one public name: signature, docstring, public methods and properties."""
    lines = [f"### `{name}`", ""]
    if inspect.ismodule(thing):
        lines += [_text(thing), ""]
        public = [(key, value) for key, value in vars(thing).items() if _is_own(thing, key, value)]
        lines += [f"- `{name}.{key}{_signature(value)}`: {_first(value)}" for key, value in public]
        return "\n".join(lines)
    lines += ["```text", f"{name}{_signature(thing)}", "```", "", _text(thing)]
    if inspect.isclass(thing) and not issubclass(thing, Exception):
        members = [(key, value) for key, value in vars(thing).items() if not key.startswith("_")]
        told = [(key, value) for key, value in members if inspect.getdoc(value) and _is_code(value)]
        lines += ["", *(f"- `.{key}{_signature(value)}`: {_first(value)}" for key, value in told)]
    return "\n".join(lines)


def _is_own(module: Any, name: str, value: Any) -> bool:
    home = getattr(value, "__module__", "")
    return not name.startswith("_") and callable(value) and home.startswith(module.__name__)


def _is_code(value: Any) -> bool:
    return callable(value) or isinstance(value, property) or hasattr(value, "func")


def _signature(thing: Any) -> str:
    if not callable(thing):
        return ""
    try:
        parameters = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):
        return "()"
    shown = []
    for each in parameters:
        if each.name in ("self", "cls"):
            continue
        star = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        simple = isinstance(each.default, str | int | float | bool | None)
        default = each.default if simple else ...
        given = "" if each.default is each.empty else f"={default!r}".replace("Ellipsis", "...")
        shown.append(f"{star}{each.name}{given}")
    return f"({', '.join(shown)})"


def _text(thing: Any) -> str:
    """Take the docstring without its examples, in Markdown."""
    paragraphs = (inspect.getdoc(thing) or "").split("\n\n")
    kept = [text for text in paragraphs if not text.lstrip().startswith(">>>")]
    return _markdown("\n\n".join(kept))


def _first(thing: Any) -> str:
    target = getattr(thing, "func", thing)  # a cached property
    return _markdown(" ".join((inspect.getdoc(target) or "").split("\n\n")[0].split()))


def _markdown(text: str) -> str:
    text = re.sub(r":\w+:`~?([^`<]+)`", r"`\1`", text)
    return text.replace("``", "`")


def page() -> str:
    """Write the whole page."""
    names = [entry(f"kappascope.{name}", getattr(kappascope, name)) for name in kappascope.__all__]
    every = sorted(corrections.Correction.__subclasses__(), key=lambda each: each.__name__)
    own = [entry(f"corrections.{each.__name__}", each) for each in every]
    head = "# Reference\n\nThis page is written from docstrings by `python docs/reference.py`."
    parts = [head, "## Public names", *names, "## Corrections", *own]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
