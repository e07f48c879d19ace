"""Checkpoints that lie elsewhere: fetched by byte range, as far as somebody asks for their bytes.

A :class:`Mirror` is a folder of files as long as those far away, empty at first. Whoever parses one
of them, in a process of its own, finds bytes missing and says which (:class:`Absent`); the process
that has the network fetches these, puts them in their place, and lets the other try again. It
understands nothing of what it fetches. So only headers and what is examined travel, and every
reader of local files reads remote ones.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import time
import urllib.error
import urllib.request
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

from kappascope.checkpoints import folders
from kappascope.checkpoints.formats import Malformed
from kappascope.checkpoints.locations import Absent
from kappascope.refusal import Refusal
from kappascope.system.workers import Done, Engine

T = TypeVar("T")

BLOCK = 1 << 16  # bytes: no less is fetched, for the next question is near
PIECE = 1 << 24  # bytes of one request: sixteen megabytes, so that a lost one costs little
STALL_SECONDS = 60.0  # without a byte, after which a server is given up
SLOWEST = 10_000  # bytes a second beyond that: less is no faster than a server that stalls
TRIES = 3  # of a request that is cut short or not answered
PAUSE_SECONDS = 2.0  # between them, for a server that has too much to do
MOST_FETCHES = 100  # for one task: each brings what the last was missing
MOST_FILES = 10_000  # of a remote folder
_LENGTH_DIGITS = 20  # of a length that a server tells, in bytes
CHANGED = "try again once nothing writes to it"
UNREACHED = "see whether it can be reached, or try later"
ADDRESS = "see whether the address is right"
LOGIN = "download it first, or see whether you are logged in"


def in_hub_cache(url: str) -> Path | None:
    """Return the folder in which Hugging Face's cache keeps a model, if it keeps all of it.

    >>> in_hub_cache("https://example.org/model.safetensors")
    """
    named = re.fullmatch(r"hf://(?:models/)?([\w.-]+)/([\w.-]+?)(?:@([\w.-]+))?/?", url)
    if named is None:
        return None
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    model = cache / f"models--{named[1]}--{named[2]}"
    revision = named[3] or "main"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        revision = (model / "refs" / revision).read_text()[:100].strip()
    folder = model / "snapshots" / revision
    try:
        folders.choose_files(folder)
    except (Malformed, OSError):
        return None
    return folder


def public(url: str) -> str:
    """Return an address without what only its owner may know: passwords, and signatures.

    >>> public("https://me:word@example.org/x.bin?Signature=abc")
    'https://example.org/x.bin?...'
    """
    parts = urlsplit(url)
    if not parts.query and "@" not in parts.netloc:
        return url
    host = parts.netloc.rpartition("@")[2]
    query = "..." if parts.query else ""
    return parts._replace(netloc=host, query=query).geturl()


class Busy(ConnectionError):  # noqa: N818 - what the server is
    """A server that has too much to do now.

    >>> str(Busy("its server answers 503"))
    'its server answers 503'
    """


class Listing(NamedTuple):
    """A file far away: its name, its length, and what changes once it is another."""

    name: str
    size: int
    version: str


class Place(ABC):
    """Where files lie that are reached over a network."""

    @abstractmethod
    def files(self) -> list[Listing]:
        """Return the one file that was named, or those of the folder."""

    @abstractmethod
    def fetch(self, file: Listing, begin: int, size: int) -> bytes:
        """Return some bytes of a file; fewer or more than asked for where the server errs."""


@dataclass(frozen=True)
class Web(Place):
    """A file at an address of the web, with the config that may lie beside it."""

    url: str

    def files(self) -> list[Listing]:
        """Ask for the length of the file, and whether a config lies beside it."""
        parts = urlsplit(self.url)
        if "@" in parts.netloc:
            raise Refusal(2, public(self.url), "was given with a password", "download it first")
        name = folders.plain_name(unquote(parts.path).rpartition("/")[2])
        if name is None:
            raise Refusal(2, self.url, "names no file", "give the address of a file")
        listed = [self._listing(name)]
        # one that cannot be had is not there
        with contextlib.suppress(Refusal, OSError, http.client.HTTPException):
            listed.append(self._listing("config.json"))
        return listed

    def fetch(self, file: Listing, begin: int, size: int) -> bytes:
        """Ask for a range; a server that sends another one, or another file, is refused."""
        last = begin + size - 1
        with self._answer(file.name, f"bytes={begin}-{last}") as answer:
            if answer.status != 206:
                wrong = "its server does not send parts of a file"
                raise Refusal(5, self.url, wrong, "download it first")
            part, _, total = str(answer.headers.get("Content-Range")).partition("/")
            if not part.startswith(f"bytes {begin}-"):
                raise Refusal(5, self.url, "its server sent another part", "download it first")
            if _version(answer.headers) != file.version or total not in (str(file.size), "*"):
                raise Refusal(2, self.url, "changed while it was read", CHANGED)
            return self._body(answer, size + 1)

    def _body(self, answer: Any, size: int) -> bytes:
        """Return what an answer holds, up to some bytes, unless it takes as good as for ever."""
        body, end = bytearray(), time.monotonic() + STALL_SECONDS + size / SLOWEST
        while len(body) < size and (more := answer.read1(min(BLOCK, size - len(body)))):
            body += more
            if time.monotonic() > end:
                wrong = f"its server sends less than {SLOWEST // 1000} kB a second"
                raise Refusal(5, self.url, wrong, "download it first")
        return bytes(body)

    def _listing(self, name: str) -> Listing:
        for _ in range(TRIES - 1):
            try:
                return self._told(name)
            except Busy:  # a config that is not read for that would change what is told
                time.sleep(PAUSE_SECONDS)
        return self._told(name)

    def _told(self, name: str) -> Listing:
        with self._answer(name, "bytes=0-0") as answer:
            total = str(answer.headers.get("Content-Range")).rpartition("/")[2]
            told = total.isascii() and total.isdigit() and len(total) < _LENGTH_DIGITS
            if answer.status != 206 or not told:
                wrong = "its server does not send parts of a file, or tell its length"
                raise Refusal(5, self.url, wrong, "download it first")
            packed = str(answer.headers.get("Content-Encoding") or "identity")
            if packed != "identity":  # of what is packed, no part is a part of the file
                wrong = f"its server packs what it sends ({packed[:20]!a})"
                raise Refusal(5, self.url, wrong, "download it first")
            return Listing(name, int(total), _version(answer.headers))

    def _answer(self, name: str, part: str) -> Any:
        parts = urlsplit(self.url)
        folder = parts.path.rpartition("/")[0]
        own = unquote(parts.path).rpartition("/")[2] == name
        address = self.url if own else parts._replace(path=f"{folder}/{name}", query="").geturl()
        headers = {"Range": part, "Accept-Encoding": "identity", "User-Agent": "kappascope"}
        request = urllib.request.Request(address, headers=headers)
        try:
            return urllib.request.urlopen(request, timeout=STALL_SECONDS)
        except urllib.error.HTTPError as error:
            error.close()
            wrong = f"its server answers {error.code}"
            if error.code == 429 or error.code >= 500:  # too much to do: another time it may
                raise Busy(wrong) from error
            advice = LOGIN if error.code in (401, 403) else ADDRESS
            raise Refusal(2, self.url, wrong, advice) from error


def _said(error: BaseException) -> str:
    """Return what an error of a network says, without its number.

    >>> _said(ConnectionRefusedError(111, "Connection refused"))
    'Connection refused'
    """
    reason = getattr(error, "reason", None) or error  # of what urllib wraps
    text = str(getattr(reason, "strerror", None) or reason) or type(error).__name__
    return " ".join(text.split())[:160]


def _version(headers: Any) -> str:
    return "|".join(str(headers.get(name)) for name in ("ETag", "Last-Modified"))


@dataclass(frozen=True)
class FileSystem(Place):
    """Whatever fsspec opens: a Hub, an object store, a server."""

    url: str
    system: Any
    path: str
    versions: dict[str, str] = field(default_factory=dict)  # of files, as they were first seen

    @classmethod
    def at(cls, url: str) -> FileSystem:
        """Open the file system of an address; what it needs may not be installed."""
        if url.startswith("hf://") and "/" not in url.removeprefix("hf://").strip("/"):
            raise Refusal(2, url, "names no model", "give it as hf://ORGANIZATION/NAME")
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            advice = "pip install 'kappascope[remote]'"
            raise Refusal(5, url, "needs fsspec", advice) from None
        try:
            system, path = url_to_fs(url)
        except ImportError as error:  # it says which package to install, and why
            wrong = str(error).partition("\n")[0].rstrip(".")
            needed = re.search(r"\binstall (\w+)", wrong, re.IGNORECASE)
            advice = f"pip install {needed[1]}" if needed else "install what it names"
            raise Refusal(5, url, wrong[:120], advice) from error
        except ValueError as error:
            advice = "give https://, hf://ORGANIZATION/NAME, s3:// or gs://"
            raise Refusal(2, url, str(error)[:120], advice) from error
        except OSError as error:  # some connect already now
            raise Refusal(5, url, _said(error), UNREACHED) from error
        return cls(url, system, path)

    def files(self) -> list[Listing]:
        """List the folder, or look at the one file."""
        facts = self.system.info(self.path)
        entries = [facts]
        self.versions[self.path] = _facts(facts)
        if facts.get("type") == "directory":
            entries = self.system.ls(self.path, detail=True)
            if len(entries) > MOST_FILES:
                wrong = f"a folder of {len(entries)} entries"
                raise Refusal(2, self.url, wrong, "give one of its files")
        listed = []
        for entry in entries:
            name = folders.plain_name(str(entry["name"]).rstrip("/").rpartition("/")[2])
            if entry.get("type") == "file" and name and type(entry.get("size")) is int:
                listed.append(Listing(name, entry["size"], ""))
        return listed

    def fetch(self, file: Listing, begin: int, size: int) -> bytes:
        """Read a range of one file."""
        path = self.path
        if path.rstrip("/").rpartition("/")[2] != file.name:
            path = f"{path.rstrip('/')}/{file.name}"
        data: bytes = self.system.cat_file(path, start=begin, end=begin + size)
        self.system.invalidate_cache()
        facts = self.system.info(path)
        if self.versions.setdefault(path, _facts(facts)) != _facts(facts):
            raise Refusal(2, self.url, "changed while it was read", CHANGED)
        if facts.get("size") != file.size:
            raise Refusal(2, self.url, "changed while it was read", CHANGED)
        return data


def _facts(entry: dict[str, Any]) -> str:
    """Return what a file system says of a file that changes when the file does."""
    names = "size ETag etag mtime LastModified last_modified blob_id created"
    return "|".join(str(entry.get(name)) for name in names.split())


@dataclass
class Mirror:
    """A folder of files as long as those far away, holding those of their bytes that were fetched.

    ``told`` is called with the bytes of every piece that arrives.
    """

    url: str
    place: Place
    told: Callable[[int], None] = lambda size: None
    fetched: int = 0
    files: dict[str, Listing] = field(default_factory=dict)
    ranges: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    folder: Path = field(default_factory=lambda: Path(mkdtemp(prefix="kappascope-mirror-")))

    def __post_init__(self) -> None:
        # when nobody needs it any more, or when the process ends
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    @classmethod
    def of(cls, url: str) -> Mirror:
        """Look at what is at an address, without a byte of its content."""
        web = urlsplit(url).scheme in ("http", "https")
        place = Web(url) if web else FileSystem.at(url)
        mirror = cls(url, place)
        with mirror._refusing():
            listed = place.files()
        if not listed:
            raise Refusal(2, url, "no file in it", "give a checkpoint or its folder")
        for file in listed:
            mirror.files[file.name] = file
            mirror.ranges[file.name] = []
            try:
                with (mirror.folder / file.name).open("wb") as empty:
                    os.truncate(empty.fileno(), file.size)
            except OSError as error:  # no file system here has files of that length
                wrong = f"a file of {file.size} bytes: {error.strerror}"
                raise Refusal(5, url, wrong, ADDRESS) from error
        mirror._write_map()
        return mirror

    @property
    def path(self) -> Path:
        """The folder, or the one file in it that is no config."""
        own = [name for name in self.files if name != "config.json"]
        is_one = isinstance(self.place, Web) or len(own) == 1
        return self.folder / own[0] if is_one else self.folder

    @property
    def size(self) -> int:
        """The bytes of all its files."""
        return sum(file.size for file in self.files.values())

    def holds(self, path: str) -> bool:
        """Tell whether a file is one of this mirror's."""
        return Path(path).parent == self.folder

    def bring(self, absent: Absent) -> None:
        """Fetch the bytes that somebody is missing, in whole blocks, into their place."""
        file = self.files[Path(absent.path).name]
        begin = absent.begin // BLOCK * BLOCK
        end = min(-(-absent.end // BLOCK) * BLOCK, file.size)
        with (self.folder / file.name).open("r+b") as mirrored:
            for start, stop in self._gaps(file.name, begin, end):
                for at in range(start, stop, PIECE):
                    data = self._piece(file, at, min(PIECE, stop - at))
                    mirrored.seek(at)
                    mirrored.write(data)
                    self.fetched += len(data)
                    self.told(len(data))
        held = sorted([*self.ranges[file.name], (begin, end)])
        merged = held[:1]
        for start, stop in held[1:]:
            if start <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(stop, merged[-1][1])
            else:
                merged.append((start, stop))
        self.ranges[file.name] = merged
        self._write_map()

    def _gaps(self, name: str, begin: int, end: int) -> Iterator[tuple[int, int]]:
        for start, stop in self.ranges[name]:
            if start < end and stop > begin:
                if begin < start:
                    yield begin, start
                begin = max(begin, stop)
        if begin < end:
            yield begin, end

    def _piece(self, file: Listing, begin: int, size: int) -> bytes:
        have = 0
        for attempt in range(1, TRIES + 1):
            if attempt > 1:
                time.sleep(PAUSE_SECONDS)
            with self._refusing(last=attempt == TRIES):
                data = self.place.fetch(file, begin, size)
                if len(data) == size:
                    return data
                have = len(data)
        what = "more" if have > size else "less"
        wrong = f"{what} was sent of {file.name} than asked for ({have} of {size} bytes)"
        raise Refusal(5, self.url, wrong, "try again")

    @contextlib.contextmanager
    def _refusing(self, last: bool = True) -> Iterator[None]:
        """Turn what a network does into one line; before the last try, into another try."""
        try:
            yield
        except Refusal:
            raise
        except FileNotFoundError as error:
            said = _said(error)
            if self.url.endswith(said.strip("/")):  # many say nothing but the path
                said = "No such file or directory"
            raise Refusal(2, self.url, said, ADDRESS) from error
        except PermissionError as error:
            raise Refusal(2, self.url, _said(error), LOGIN) from error
        except Exception as error:  # every file system has its own
            if last:
                raise Refusal(5, self.url, _said(error), UNREACHED) from error

    def _write_map(self) -> None:
        """Say which bytes are there; by renaming, for somebody may be reading."""
        new = self.folder / f"{folders.MAP}.new"
        new.write_text(json.dumps(self.ranges))
        new.replace(self.folder / folders.MAP)


@dataclass(frozen=True)
class Fetching:
    """An engine whose items may miss bytes of mirrors: these are fetched, those tried again."""

    engine: Engine
    mirrors: tuple[Mirror, ...]

    def run(self, work: Callable[[T], object], items: Sequence[T]) -> Generator[Done[T]]:
        """Yield every item once, when nothing is missing any more."""
        for _ in range(MOST_FETCHES):
            again: list[T] = []
            with contextlib.closing(self.engine.run(work, items)) as ended:
                for done in ended:
                    if isinstance(done.error, Absent):
                        self._bring(done.error)
                        again.append(done.item)
                    else:
                        yield done
            if not again:
                return
            items = again
        for item in items:
            text = f"{MOST_FETCHES} parts were fetched, and more are missing"
            yield Done(item, 0.0, text, RuntimeError(text))

    def _bring(self, absent: Absent) -> None:
        for mirror in self.mirrors:
            if mirror.holds(absent.path):
                mirror.bring(absent)


RELOCATED: dict[str, str] = {}
"""Where the folders of mirrors are that were made on another machine."""


def relocated(path: str) -> str:
    """Return where a mirrored file or folder is on the machine that we are on.

    >>> relocated("model.pt")
    'model.pt'
    """
    whole = Path(path)
    for folder, here in RELOCATED.items():
        if path == folder:
            return here
        if str(whole.parent) == folder:
            return str(Path(here) / whole.name)
    return path


@dataclass(frozen=True)
class FetchingThere:
    """An engine of a node, which mirrors what the driver does: addresses, folders and files."""

    engine: Engine
    listed: tuple[tuple[str, str, tuple[Listing, ...]], ...]

    def run(self, work: Callable[[T], object], items: Sequence[T]) -> Generator[Done[T]]:
        """Yield every item once, with what it misses fetched to this node."""
        folders: dict[str, str] = {}
        mirrors = []
        for url, folder, files in self.listed:
            mirror = _mirror(url)
            if tuple(mirror.files.values()) != files:
                wrong = "changed while it was read"
                for item in items:
                    yield Done(item, 0.0, wrong, Refusal(2, url, wrong, CHANGED))
                return
            folders[folder] = str(mirror.folder)
            mirrors.append(mirror)
        yield from Fetching(self.engine, tuple(mirrors)).run(
            partial(_relocating, work, folders), items
        )


@cache
def _mirror(url: str) -> Mirror:
    """Return the mirror of an address in this process, which lasts as long."""
    return Mirror.of(url)


def _relocating(work: Callable[[T], object], folders: dict[str, str], item: T) -> object:
    """Do an item in a process that finds its mirrors where they are here."""
    RELOCATED.update(folders)
    return work(item)
