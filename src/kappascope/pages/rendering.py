"""Pages that need nothing but themselves: every name is text, and only what we wrote may run.

A page is a template with the style and script of all pages, those of charts, and its own. Its
policy names the two by their hashes, so that a browser runs nothing else even if a name should slip
through unescaped.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kappascope.text import bracketed, error_text, first_few, number, plural, words


def fill(
    name: str,
    filters: Iterable[Callable[..., Any]] = (),
    connects: str = "'none'",
    **content: Any,
) -> str:
    """Fill a template with its content; functions in ``filters`` go by their names.

    A page asks the network for nothing, unless the policy names a source that it ``connects`` to.

    >>> from kappascope.clinic.diagnosis import Diagnosis  # which has a page
    >>> html = Diagnosis("<hr>").html()
    >>> "<hr>" in html, "&lt;hr&gt;" in html
    (False, True)
    """
    style, script = (
        "".join(_asset(part, kind) for part in ("page", "charts", name)) for kind in ("css", "js")
    )
    return (
        _environment(tuple(filters))
        .get_template(f"{name}.html")
        .render(
            style=Markup(style),  # ours, and named by its hash: nothing else may style or run
            script=Markup(script),
            policy=f"default-src 'none'; img-src data:; style-src {_hash(style)}; "
            f"script-src {_hash(script)}; connect-src {connects}; base-uri 'none'; "
            "form-action 'none'",
            **content,
        )
    )


@cache
def _environment(filters: tuple[Callable[..., Any], ...]) -> Environment:
    """The environment of templates with these filters, kept: compiling takes longest."""
    environment = Environment(
        loader=PackageLoader("kappascope.pages"),
        autoescape=True,
        finalize=lambda value: (
            value
            if isinstance(value, Markup) or (text := str(value)).isprintable()
            else legible(text)
        ),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {
        "separators": (",", ":"),
        "ensure_ascii": False,
        "allow_nan": False,
    }
    wording = (number, bracketed, words, plural, first_few, legible)
    environment.filters.update((function.__name__, function) for function in (*wording, *filters))
    environment.globals["guarded"] = guarded
    return environment


def guarded(caller: Callable[[], str]) -> str:
    """Render a panel, or, where that fails, a line that says why: the others stand.

    >>> guarded(lambda: {}["<b>"])
    Markup('<p class="absent">This could not be shown (KeyError: &#39;&lt;b&gt;&#39;).</p>')
    """
    try:
        return caller()
    except Exception as error:
        line = Markup('<p class="absent">This could not be shown ({}).</p>')
        return line.format(error_text(error))


def legible(text: str) -> str:
    r"""Escape the characters that a browser cannot show.

    Direction marks could make one name look like another.

    >>> legible("a\u202eb"), legible("two\nlines\x00")
    ('a\\u202eb', 'two\nlines\\x00')
    """
    return "".join(
        c if c.isprintable() or c in "\n\xa0" else c.encode("unicode_escape").decode() for c in text
    )


def _asset(name: str, kind: str) -> str:
    return (files("kappascope.pages") / "templates" / f"{name}.{kind}").read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
