"""A refusal says what is not done, and why: the one error that a caller is meant to catch."""

from __future__ import annotations


class Refusal(Exception):  # noqa: N818 - its public name; a caller refuses, it need not have failed
    """Something cannot be read, started or continued.

    A refusal has the exit ``code`` of the command, what was ``given``, what is ``wrong`` with it
    and an ``advice``.

    >>> print(Refusal(4, "--trials 0", "no trial to run", "ask for 1 or more"))
    --trials 0: no trial to run (ask for 1 or more)
    """

    def __init__(self, code: int, given: str, wrong: str, advice: str) -> None:
        super().__init__(code, given, wrong, advice)  # pickle passes these on to another process
        self.code, self.given, self.wrong, self.advice = code, given, wrong, advice

    def __str__(self) -> str:
        return f"{self.given}: {self.wrong} ({self.advice})"
