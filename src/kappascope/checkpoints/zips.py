"""Zip archives, as torch and NumPy write them: where each member lies, and nothing unpacked."""

from __future__ import annotations

import io
import os
import re
import zipfile

from kappascope.checkpoints.formats import AGAIN, Malformed, quoted
from kappascope.checkpoints.locations import StorageLocation

_MOST_MEMBERS = 65_535  # what a zip directory counts without its extension for more
_LONGEST_DIRECTORY = 1 << 24  # bytes: 256 for each member
_BOMB_SIZE, _BOMB_RATIO = 1 << 26, 100  # weights hardly shrink: more is made to fill a memory


class _Window(io.RawIOBase):
    """A part of a file, of which no directory is read that would fill the memory."""

    def __init__(self, descriptor: int, part: StorageLocation) -> None:
        self.descriptor, self.begin, self.size, self.at = descriptor, part.begin, part.size, 0
        self.file = part.file

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self.at = {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.size}[whence] + offset
        if self.at < 0:
            raise ValueError("before the beginning")
        return self.at

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(self.size - self.at, 0)
        size = left if size is None or size < 0 else min(size, left)
        if size > _LONGEST_DIRECTORY:
            raise Malformed("a zip archive with an oversized directory", AGAIN)
        self.file.require(self.begin + self.at, size)
        data = os.pread(self.descriptor, size, self.begin + self.at)
        self.at += len(data)
        return data


def archive_members(archive: StorageLocation) -> dict[str, StorageLocation]:
    """Return where the members of a zip archive lie; refuse one that is made to do harm."""
    file = archive.file
    with file.opened() as descriptor, _Window(descriptor, archive) as stream:
        try:
            infos = zipfile.ZipFile(stream).infolist()
            if len(infos) > _MOST_MEMBERS:
                raise Malformed(f"a zip archive of {len(infos)} members", "save as safetensors")
            members = [(info.orig_filename, _location(archive, info, stream)) for info in infos]
        except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError, IndexError) as error:
            raise Malformed("truncated or damaged zip archive", AGAIN) from error
        except (OverflowError, KeyError, EOFError) as error:
            raise Malformed("damaged zip archive", AGAIN) from error
    last = 0
    for name, location in sorted(members, key=lambda pair: pair[1].begin):
        if location.begin < last:
            raise Malformed(f"member {quoted(name)} of the zip archive overlaps another", AGAIN)
        last = location.begin + location.taken
    if len({name for name, _ in members}) < len(members):
        raise Malformed("a zip archive with two members of one name", AGAIN)
    return dict(members)


def _location(archive: StorageLocation, info: zipfile.ZipInfo, stream: _Window) -> StorageLocation:
    name, size, packed = info.orig_filename, info.file_size, info.compress_size
    if re.search(r"(^|[/\\])\.\.([/\\]|$)|^[/\\]|\\|\0|^\w:", name):
        raise Malformed(f"a zip archive with a member at {quoted(name)}", "do not unpack it")
    if info.flag_bits & 0b0010_0001 or info.flag_bits & 1 << 13:
        raise Malformed("an encrypted or patched zip archive", "unpack it and save it again")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise Malformed("a zip archive packed in an unknown way", "save it again with torch.save")
    if size > _BOMB_SIZE and size > _BOMB_RATIO * packed:
        raise Malformed(f"a zip bomb: {quoted(name)} swells to {size} bytes", "do not unpack it")
    stored = info.compress_type == zipfile.ZIP_STORED
    stream.seek(info.header_offset)
    local = stream.read(30)
    lengths = int.from_bytes(local[26:28], "little"), int.from_bytes(local[28:30], "little")
    begin = info.header_offset + 30 + sum(lengths)
    same = stream.read(lengths[0]) == name.encode("utf-8" if info.flag_bits & 1 << 11 else "cp437")
    fits = 0 <= packed <= archive.size - begin and size >= 0 and (size == packed or not stored)
    if local[:4] != b"PK\3\4" or not same or not fits:
        raise Malformed(f"damaged zip archive: {quoted(name)} is not where it should be", AGAIN)
    begin += archive.begin
    return StorageLocation(archive.file, begin, size, None if stored else packed, info.CRC)
