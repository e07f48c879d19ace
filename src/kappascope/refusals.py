"""What is not done, and why: the one error that a caller is meant to catch."""

from __future__ import annotations


class Refusal(Exception):  # noqa: N818 - what it is; the code makes it an error
    """Something that cannot be read, started or gone on with.

    It has the exit ``code`` of the command, what was ``given``, what is ``wrong`` with it and an
    ``advice``.

    >>> print(Refusal(4, "--trials 0", "no trial to run", "ask for 1 or more"))
    --trials 0: no trial to run (ask for 1 or more)
    """

    def __init__(self, code: int, given: str, wrong: str, advice: str) -> None:
        super().__init__(code, given, wrong, advice)  # what pickle hands over, between processes
        self.code, self.given, self.wrong, self.advice = code, given, wrong, advice

    def __str__(self) -> str:
        return f"{self.given}: {self.wrong} ({self.advice})"
