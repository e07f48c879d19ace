"""What is surely no checkpoint, told at once: no file, a text, a file of another kind.

Nothing here loads torch, which takes seconds; what may be a checkpoint is left to the readers.
"""

from __future__ import annotations

import pickletools
import re
import stat
from importlib.metadata import entry_points
from io import BytesIO
from pathlib import Path

from kappascope.checkpoints import folders
from kappascope.checkpoints.formats import HEAD, Malformed, format_of
from kappascope.refusal import Refusal

NO_CHECKPOINT = "give a checkpoint or its folder"
TEXT = "neither a safetensors nor a PyTorch file: it is text"
TABLES = (".csv", ".parquet")


def is_remote(name: object) -> bool:
    """Tell whether a name is an address.

    >>> is_remote("hf://org/model"), is_remote("C:/model.pt"), is_remote("model.pt")
    (True, False, False)
    """
    return isinstance(name, str) and re.match(r"[a-z][a-z0-9+.-]+://", name) is not None


def refuse_unreadable(given: str) -> None:
    """Refuse a path at which there is nothing, or a file that is no checkpoint.

    >>> refuse_unreadable("nowhere/model")
    Traceback (most recent call last):
    kappascope.refusal.Refusal: nowhere/model: No such file or directory (a model ... hf://...)
    """
    path = Path(given)
    if (
        is_remote(given)
        or path.suffix.lstrip(".") in entry_points(group="kappascope.readers").names
    ):
        return
    try:
        if not stat.S_ISREG(path.stat().st_mode) or _is_list(path.name):
            return
        with path.open("rb") as file:
            head = file.read(HEAD)
        if format_of(head) == "unknown" and is_text(head) and path.suffix != ".safetensors":
            raise Malformed(TEXT, NO_CHECKPOINT)
    except Malformed as error:
        raise Refusal(2, given, error.wrong, error.advice) from error
    except FileNotFoundError as error:
        wrong = error.strerror or "is not there"
        raise Refusal(2, given, wrong, advice_on_missing(path)) from error
    except (OSError, ValueError):  # who opens it will say why that cannot be done
        return


def _is_list(name: str) -> bool:
    """Tell whether a file stands for others, whatever format it has itself."""
    return folders.is_index(name) or name == folders.METADATA or name.endswith(".distcp")


def advice_on_missing(path: Path) -> str:
    """Say what may have been meant by a path at which there is nothing.

    >>> advice_on_missing(Path("microsoft/phi-2"))
    'a model of the Hugging Face Hub is hf://microsoft/phi-2'
    """
    given = str(path)
    if path.suffix in TABLES:
        return f"--csv prints its table; --table {path.name} writes it"
    if path.is_absolute() or re.search(r"\.(safetensors|bin|pt|pth|ckpt|gguf|onnx|npz?)$", given):
        return NO_CHECKPOINT
    if re.fullmatch(r"[\w.-]+/[\w.-]+", given) and not path.parent.exists():
        return f"a model of the Hugging Face Hub is hf://{given}"
    if re.fullmatch(r"[\w-][\w.-]*", given):
        return f"{NO_CHECKPOINT}; a model of the Hugging Face Hub is hf://ORGANIZATION/{given}"
    return NO_CHECKPOINT


def is_text(head: bytes) -> bool:
    r"""Tell whether a file that begins so is text and not one of the oldest pickles, which are too.

    >>> is_text(b"# Notes\n"), is_text(b"(dp0\nS'w'\np1\nI7\ns."), is_text(b"\x00\x01")
    (True, False, False)
    """
    try:
        characters = head.decode("utf-8", errors="ignore" if len(head) == HEAD else "strict")
    except UnicodeDecodeError:
        return False
    if not all(c.isprintable() or c in "\t\n\r\f" for c in characters):
        return False
    stream = BytesIO(head)
    try:
        for _ in pickletools.genops(stream):
            pass
    except ValueError:
        # a file that goes on behind its head might go on as a pickle does
        return len(head) < HEAD or stream.tell() < len(head)
    return False
