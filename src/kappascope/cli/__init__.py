"""The command: every public file but ``app`` is one of its subcommands."""

import sys


def told_alone(error: Exception) -> int:
    """Tell of an error where the application cannot: write its line and its document.

    Nothing is loaded for that. The exit code is given back.
    """
    told = f"{type(error).__name__}: {error}".removesuffix(": ")[:100]
    wrong = "".join(letter for letter in told if letter.isprintable() and letter not in '"\\')
    advice = "free memory, raise the limits that `ulimit -a` shows, or install it anew"
    if "--json" in sys.argv:
        fields = f'"code": 5, "given": "kappascope", "wrong": "{wrong}", "advice": "{advice}"'
        sys.stdout.write(f'{{"error": {{{fields}}}}}\n')
    sys.stderr.write(f"kappascope: error: kappascope: {wrong} ({advice})\n")
    return 5
