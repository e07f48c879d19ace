"""``kappascope explain``: what a rule of a diagnosis looks for, and why."""

from __future__ import annotations

from typing import Annotated

import typer

from kappascope.cli._options import Debug
from kappascope.cli._terminal import loading, tell


def explain(
    rules: Annotated[
        list[str] | None, typer.Argument(metavar="RULE...", help="Rules by name; none lists them.")
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
        for name in rule_names():
            tell(explanation(name).splitlines()[0])
        return
    tell("\n\n".join(explanation(name) for name in rules))
