"""``kappascope explain``: what a rule of a diagnosis looks for, and why."""

from __future__ import annotations

from typing import Annotated

import typer

from kappascope.cli._help import filled
from kappascope.cli._options import Debug
from kappascope.cli._terminal import draw, loading, tell
from kappascope.text import ruled_table


def explain(
    rules: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RULE...", help="The names of rules. Without one, all rules are listed."
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Explain rules of a diagnosis: what they look for, what they compare with, and why.

    For example:
      kappascope explain untrained
    """
    with loading():
        from kappascope.clinic.judgement import explanation, rule_names

    if not rules:
        listed = ruled_table("rule", "concern", "what it looks for")
        listed.columns[0].no_wrap = listed.columns[1].no_wrap = True
        for name in rule_names():
            head, looks_for, *_ = explanation(name).split("\n\n")
            listed.add_row(name, head.partition(": ")[2].partition(",")[0].split()[-1], looks_for)
        draw(listed)
        tell("`kappascope explain RULE` has the limits of a rule and their reasons.")
        return
    explained = (explanation(name).split("\n\n") for name in rules)
    tell("\n\n".join("\n\n".join(map(filled, paragraphs)) for paragraphs in explained))
