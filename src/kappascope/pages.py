"""Pages that need nothing but themselves: every name is text, and only what we wrote may run.

A page is a template with the style and script of all pages and its own. Its policy names the two
by their hashes, so that a browser runs nothing else even if a name should slip through unescaped.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kappascope.prose import interval, listed, number, plural, words

SPEECH: tuple[Callable[..., str], ...] = (number, interval, words, plural, listed)


def render(name: str, filters: Iterable[Callable[..., Any]] = (), **content: Any) -> str:
    """The page that a template makes of its content; functions in ``filters`` go by their names.

    >>> from kappascope.clinic.page import page  # one that is made here
    >>> "<hr>" in page({"source": "<hr>"}), "&lt;hr&gt;" in page({"source": "<hr>"})
    (False, True)
    """
    style, script = (_asset("page", kind) + _asset(name, kind) for kind in ("css", "js"))
    environment = _environment()
    environment.filters.update((one.__name__, one) for one in (*SPEECH, *filters))
    return environment.get_template(f"{name}.html").render(
        style=Markup(style),  # ours, and named by its hash: nothing else may style or run
        script=Markup(script),
        policy=f"default-src 'none'; img-src data:; style-src {_hash(style)}; "
        f"script-src {_hash(script)}; base-uri 'none'; form-action 'none'",
        **content,
    )


def _environment() -> Environment:
    found = Environment(
        loader=PackageLoader("kappascope"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.policies["json.dumps_kwargs"] = {
        "separators": (",", ":"),
        "ensure_ascii": False,
        "allow_nan": False,
    }
    return found


def _asset(name: str, kind: str) -> str:
    return (files("kappascope") / "templates" / f"{name}.{kind}").read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
