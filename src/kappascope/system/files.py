"""Write files that are whole or absent, seal them with a digest, and name what bits depend on.

A folder survives a kill at any moment: every file is written beside its place and renamed into it.
A sealed file begins with the digest of the rest, so that a damaged one is recognized.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kappascope.refusal import Refusal

LIBRARIES = ("torch", "numpy", "scipy", "pyarrow")
MODES = (  # variables that choose among the instructions of a processor, and so among roundings
    "ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "MKL_DEBUG_CPU_TYPE",
    "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA",
    "NPY_DISABLE_CPU_FEATURES", "NPY_ENABLE_CPU_FEATURES", "GLIBC_TUNABLES",
)  # fmt: skip


def write(path: Path, data: bytes) -> None:
    """Put ``data`` where the user says: a link is followed, and a pipe or a device is written to.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     write(Path(folder) / "file", b"whole")
    ...     (Path(folder) / "file").read_bytes()
    b'whole'
    """
    try:
        if path.exists() and not path.is_file():  # a pipe or a device, which keeps nothing
            # without a reader a pipe would wait for ever; with this it is an error
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_NONBLOCK), "wb") as file:
                os.set_blocking(file.fileno(), True)
                file.write(data)
            return
        path = Path(os.path.realpath(path))  # the file that a link leads to, not the link
    except OSError as error:
        raise unwritable(path, error) from error
    write_own(path, data)


def write_own(path: Path, data: bytes) -> None:
    """Put ``data`` at ``path``: whatever happens, the file there is the old one or the new one.

    For files of our own folders, where a link was put by somebody else: it is refused.
    """
    refuse_link(path)
    beside = path.with_name(f".{path.name[:40]}.{os.getpid()}.tmp")  # names have a limit
    try:
        try:
            beside.unlink(missing_ok=True)  # of a process that was killed, and had our number
            with beside.open("xb") as file:  # which follows no link
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)  # a rename lasts once its folder is on the disk
            finally:
                os.close(folder)
        finally:
            with suppress(OSError):
                beside.unlink()
    except OSError as error:
        raise unwritable(path, error) from error


def read_own(path: Path) -> bytes:
    """Read a file of our own folders; a link is refused, and a pipe is not waited for."""
    refuse_link(path)
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "is no regular file", str(path))
        return file.read()


def refuse_link(path: Path) -> None:
    """Refuse a symbolic link where we keep files of our own: it could lead to anybody's."""
    if path.is_symlink():
        wrong = "is a symbolic link: what it leads to is neither read nor written"
        raise Refusal(4, str(path), wrong, "remove it, or name another folder")


def unwritable(path: Path, error: OSError) -> Refusal:
    """Return the refusal of a file or folder that the system does not let us write.

    >>> unwritable(Path("out"), OSError(28, "No space left on device")).wrong
    'cannot be written: No space left on device'
    """
    wrong = f"cannot be written: {error.strerror or type(error).__name__}"
    return Refusal(5, str(path), wrong, "make room or name another place; what is done is kept")


def write_sealed(path: Path, body: bytes) -> None:
    """Write ``body`` after a line with its digest, by which :func:`read_sealed` knows it.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     write_sealed(Path(folder) / "file", b"whole")
    ...     read_sealed(Path(folder) / "file")
    b'whole'
    """
    write_own(path, seal(body))


def read_sealed(path: Path) -> bytes | None:
    """Return what :func:`write_sealed` wrote; None if the file is absent or damaged."""
    try:
        return sealed_body(read_own(path))
    except OSError:
        return None


def seal(body: bytes) -> bytes:
    """Return the bytes of a sealed file: a line with the digest of the rest, and the rest.

    >>> sealed_body(seal(b"whole")), sealed_body(seal(b"whole")[:-1])
    (b'whole', None)
    """
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def sealed_body(data: bytes) -> bytes | None:
    """Return what was sealed; None if the bytes are not what they were."""
    _, _, body = data.partition(b"\n")
    return body if data == seal(body) else None


def source_digest(*rooms: str) -> str:
    """Return the digest of the source of some folders of the package.

    >>> source_digest("matrix") == source_digest("matrix") != source_digest("model")
    True
    """
    package = Path(__file__).parents[1]
    files = [file for room in rooms for file in sorted((package / room).rglob("*.py"))]
    return digest([[file.name, hashlib.sha256(file.read_bytes()).hexdigest()] for file in files])


@dataclass(frozen=True)
class FileDigest:
    """A file, its size in bytes and the SHA-256 digest of its content, if it could be read."""

    path: str
    size: int
    sha256: str | None

    @classmethod
    def of(cls, path: str | Path) -> FileDigest:
        """Read a file once and digest it.

        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     _ = (Path(folder) / "file").write_bytes(b"")
        ...     FileDigest.of(f"{folder}/file").sha256[:8]
        'e3b0c442'
        """
        with Path(path).open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
            return cls(str(path), file.tell(), found)


def digest(value: Any) -> str:
    """Return the SHA-256 digest of a JSON value, whatever the order of its keys.

    >>> digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def strict(value: Any) -> bytes:
    """Return JSON that every reader takes: a NaN or an infinity is an error.

    >>> strict([1, None])
    b'[1, null]'
    """
    return json.dumps(value, allow_nan=False).encode()


@cache
def environment() -> Mapping[str, str | int]:
    """Return what the bits of a result depend on besides setting and code: libraries, processor.

    >>> environment()["threads"]
    1
    """
    return {**unloaded_environment(), "cpu capability": _capability()}


def unloaded_environment() -> dict[str, str | int]:
    """Return what of :func:`environment` can be told without loading torch.

    >>> unloaded_environment()["cpu capability"]
    'unknown'
    """
    modes = [f"{name}={os.environ[name]}" for name in MODES if name in os.environ]
    return {
        "kappascope": _version("kappascope"),
        "python": platform.python_version(),
        **{name: _version(name) for name in LIBRARIES},
        "cpu": _processor(),
        "cpu capability": "unknown",
        "cpu modes": " ".join(modes) or "default",
        "threads": 1,
        "dtype": "float64 on paper streams, as its page says on own streams",
    }


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "absent"


def _capability() -> str:
    """Name the instructions that torch uses: the processor's, or fewer if it was told so."""
    from torch.backends.cpu import get_cpu_capability

    return str(get_cpu_capability())


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
