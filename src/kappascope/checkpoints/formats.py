"""What a file really is, whatever its name says: told from its first bytes."""

from __future__ import annotations

import re

LONGEST_HEADER = 100_000_000  # of a safetensors file, in bytes: the format's own limit
HEAD = 512  # bytes that tell every format here; the magic word of a tar ends at 262


class Malformed(Exception):  # noqa: N818 - what the content is
    """Content that cannot be read: what is wrong with it, and what to do.

    >>> str(Malformed("an HTML page", "download the file itself"))
    'an HTML page (download the file itself)'
    """

    def __init__(self, wrong: str, advice: str) -> None:
        super().__init__(wrong, advice)
        self.wrong, self.advice = wrong, advice

    def __str__(self) -> str:
        return f"{self.wrong} ({self.advice})"


def quoted(name: object) -> str:
    r"""Return a name from a file, short and on one line, to be shown in a sentence.

    >>> quoted("a\nb" + 100 * "c")
    "'a\\nbccccccccccccccccccccccccccccccccccccccccccccccc...'"
    """
    if not isinstance(name, str):  # which may be endless to print
        return f"(of type {type(name).__name__})"
    return repr(name if len(name) <= 53 else name[:50] + "...")


AGAIN = "download or save it again"
SAVE = "where you trust it: torch.save(model.state_dict(), ...) or safetensors"
_UNPACK = "unpack it and give what is inside"
_CONVERT = "convert it to safetensors first"

# (pattern at the beginning, the format that is read here)
_READ = [
    (rb"GGUF", "gguf"),
    (rb"\x93NUMPY", "npy"),
    # a mapping, and the text that is its first key
    (rb"(?:[\x81-\x8f]|\xde..|\xdf....)[\xa0-\xbf\xd9-\xdb]", "flax"),
    (rb"PK(?:\x03\x04|\x05\x06)", "zip"),
    (rb"\x80[\0-\5]", "pickle"),
    # field 1 (ir_version, small), then field 2 (producer) or others of a ModelProto
    (rb"\x08[\x01-\x20](?:[\x12\x1a\x22\x32]|\x28|\x3a|\x42)", "onnx"),
]
# (pattern at the beginning, what it is, what to do); the first that fits
_SIGNS = [
    (rb"version https://git-lfs", "a Git LFS pointer, not the file it stands for", "git lfs pull"),
    (rb"\s*(?i:<!doctype html|<html|<head)", "an HTML page", "download the file itself"),
    (rb"\s*<\?xml|\s*<(?i:svg|error)", "an XML document", "download the file itself"),
    (rb"\x1f\x8b", "gzip data", _UNPACK),
    (rb"BZh[1-9]", "bzip2 data", _UNPACK),
    (rb"\xfd7zXZ\0", "xz data", _UNPACK),
    (rb"\x28\xb5\x2f\xfd", "zstd data", _UNPACK),
    (rb"7z\xbc\xaf\x27\x1c|Rar!\x1a\x07", "a packed archive", _UNPACK),
    (rb"(?s:.{257})ustar", "a tar archive", _UNPACK + "; torch's tar format: save it anew"),
    (rb"ggml|lmgg|tjgg|fmgg|algg", "an old GGML file", "give the safetensors it was made from"),
    (rb"\x89HDF\r\n\x1a\n", "an HDF5 file (Keras, TensorFlow)", _CONVERT),
    (rb"(?s:.{4})TFL3", "a TensorFlow Lite model", _CONVERT),
    (rb"PAR1", "a Parquet table", "give the checkpoint itself"),
    (rb"ARROW1", "an Arrow table", "give the checkpoint itself"),
    (rb"%PDF-", "a PDF document", "give the checkpoint itself"),
    (rb"\x89PNG|\xff\xd8\xff|GIF8", "an image", "give the checkpoint itself"),
    (rb"\x7fELF|MZ\x90|\xca\xfe\xba\xbe", "a program", "give the checkpoint itself"),
    (rb"#!", "a script", "give the checkpoint itself"),
    (rb"\x0a(?s:.)\x08?\x01?(?s:.{0,40})(?:saved_model|serve)", "a TensorFlow model", _CONVERT),
    (rb"\s*(?:\{\s*[\"}]|\[\s*[\[\]{\"\d-])", "JSON text",
     "give the weights or the folder they are in"),
    (rb"\0{64}", "all zeros at its beginning", AGAIN),
]  # fmt: skip


def format_of(head: bytes) -> str:
    r"""Name a format that is read here, or ``unknown``; anything else raises `Malformed`.

    >>> format_of((16).to_bytes(8, "little") + b"{"), format_of(b"PK\3\4"), format_of(b"\x80\2}.")
    ('safetensors', 'zip', 'pickle')
    >>> format_of(b"version https://git-lfs.github.com/spec/v1")
    Traceback (most recent call last):
    kappascope.checkpoints.formats.Malformed: a Git LFS pointer, not ... (git lfs pull)
    """
    if not head:
        raise Malformed("is empty", AGAIN)
    # First, for the length of a header may begin with the bytes of any other sign.
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= LONGEST_HEADER:
        return "safetensors"
    for pattern, form in _READ:
        if re.match(pattern, head, re.DOTALL):
            return form
    for pattern, name, advice in _SIGNS:
        if re.match(pattern, head):
            raise Malformed(name, advice)
    return "unknown"
