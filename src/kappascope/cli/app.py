"""The application: it finds the commands, runs one and turns what happens into an exit code.

Results go to the standard output; progress and the one line of an error go to the error output.
A command is a file of this folder with a function of its name.
"""

from __future__ import annotations

import gc
import io
import logging
import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from inspect import signature
from typing import Annotated

import typer

from kappascope import cli
from kappascope.cli._errors import error_line, refusal_of, signals, take_signals, usage_error
from kappascope.cli._help import command_page, overview
from kappascope.cli._terminal import say, tell, told
from kappascope.refusal import Refusal
from kappascope.system.files import strict
from kappascope.system.workers import ONE_THREAD

PANELS = {  # what the commands are for; one that is not named here is for maintainers
    "Look into weights": ("diagnose", "diff", "survey", "explain", "watch", "doctor"),
    "The laboratory": ("reproduce", "study", "join"),
}
FOR_MAINTAINERS = "For maintainers"

app = typer.Typer(
    help="Look into the weight matrices of neural networks.", pretty_exceptions_enable=False
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    """Answer what needs no command."""
    if version:
        from importlib.metadata import version as installed

        typer.echo(f"kappascope {installed('kappascope')}")
    elif context.invoked_subcommand is None:
        tell(overview(panels(), COMMANDS))


def panels() -> dict[str, list[str]]:
    """Find the commands, the public files of this folder but this one, and group them by use.

    >>> list(panels())[0], panels()["Look into weights"][0]
    ('Look into weights', 'diagnose')
    """
    files = {file.name for file in pkgutil.iter_modules(cli.__path__)}
    names = {name for name in files if not name.startswith("_") and name != "app"}
    found = {title: [name for name in listed if name in names] for title, listed in PANELS.items()}
    return found | {FOR_MAINTAINERS: sorted(names - {name for p in found.values() for name in p})}


def command_names() -> list[str]:
    """List the commands in the order of the help.

    >>> command_names()[0]
    'diagnose'
    """
    return [name for names in panels().values() for name in names]


COMMANDS: dict[str, Callable[..., None]] = {
    name: getattr(import_module(f"kappascope.cli.{name}"), name) for name in command_names()
}
for _name, _command in COMMANDS.items():
    app.command(_name)(_command)


SPARE_BYTES = 2**23  # more than an error and its document take
HELP, VERBOSE = {"-h", "--help"}, {"-v", "--verbose"}  # every command takes them


def run(arguments: Sequence[str]) -> int:
    """Do what the arguments say and give the exit code."""
    os.environ.update(ONE_THREAD)  # before numpy and torch are loaded, or it is too late
    _drop_sizes_of_nothing()
    gc.set_threshold(100_000)  # loading torch makes a million objects and no garbage
    if VERBOSE & {*arguments}:
        logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr)
        logging.getLogger("kappascope").setLevel(logging.DEBUG)
        if "verbose" not in signature(COMMANDS.get(arguments[0], root)).parameters:
            arguments = [argument for argument in arguments if argument not in VERBOSE]
    told()  # what an earlier command of this process printed
    spare = bytearray(SPARE_BYTES)  # never touched, so that it costs addresses alone
    with signals() as came:
        try:
            take_signals()
            if HELP & {*arguments} and arguments[0] in HELP | {*COMMANDS}:
                tell(_help(arguments[0]))
                return 0
            command = typer.main.get_command(app)
            code = command.main(list(arguments), "kappascope", standalone_mode=False)
            if came:  # in a callback, where Python drops exceptions
                raise came[0]
            return int(code or 0)
        except BaseException as error:
            spare.clear()  # where memory is out, there is some for the error
            if isinstance(error, SystemExit):
                if _only_help(arguments):  # rich found that nobody reads it
                    return 0
                error = error.__context__ or error  # typer ends like this at any broken pipe
            if "--debug" in arguments:
                traceback.print_exc()
            if not came and usage_error(error):
                refusal = _wrong_usage(usage_error(error), arguments)
            else:
                refusal = refusal_of(came[0] if came else error, arguments)
            if "--json" in arguments and not told():
                with suppress(Refusal):  # an output that takes nothing may be the error
                    tell(strict({"error": vars(refusal)}).decode())
            say(error_line(refusal))
            return refusal.code


def _help(named: str) -> str:
    known = named in COMMANDS
    return command_page(named, COMMANDS[named]) if known else overview(panels(), COMMANDS)


def _drop_sizes_of_nothing() -> None:
    """Forget the size of a terminal that has no room: rich would print nothing on it."""
    for name in ("COLUMNS", "LINES"):
        if not re.fullmatch(r"0*[1-9][0-9]{0,5}", os.environ.get(name, "80")):
            del os.environ[name]


def _only_help(arguments: Sequence[str]) -> bool:
    return not {*arguments} & {*COMMANDS}


def _wrong_usage(complaint: str, arguments: Sequence[str]) -> Refusal:
    """Refuse arguments; where a JSON document was asked for, print one that says so."""
    wrong = complaint.replace("Value error, ", "").rstrip(".")
    named = f"{arguments[0]} " if arguments and arguments[0] in COMMANDS else ""
    refusal = Refusal(4, " ".join(arguments), wrong, f"see kappascope {named}--help")
    if named == "diagnose " and "--json" in arguments:
        from kappascope.cli.diagnose import print_document

        print_document([], refusal)
    elif named == "diff " and "--json" in arguments:
        from kappascope.cli.diff import print_failed_diff

        print_failed_diff(refusal)
    return refusal


def main() -> None:
    """Run the command of the shell and end with its exit code."""
    _open_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # whose encoding may lack what names are made of
            stream.reconfigure(errors="replace")
    code = run(sys.argv[1:])
    gc.freeze()  # or Python looks through a million objects once more, for a second, before it ends
    sys.exit(code)


def _open_streams() -> None:
    """Put a device that keeps nothing in the place of standard streams that the caller closed.

    Else the next file that is opened would get the number of one, and be written to by libraries.
    A result that is lost is an error, a line of progress is not.
    """
    for number, mode in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)  # the lowest number that is free
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)
