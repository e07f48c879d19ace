"""What a pickle may ask for, and what the asking means. Nothing asked for is ever imported.

A pickle is a program, and the names in it are the functions it wants to call. Some build tensors
and containers: `builders.py` does so instead. A class of someone else becomes an inert
stand-in, which does nothing and keeps what it was given. All the rest is refused by name: whatever
the standard library can do, and every function, since only running it would tell what it makes.

This labels files, it guards nothing: a file is safe to read here because nothing in it is run.
"""

from __future__ import annotations

import re
import sys

# Names of the standard library that hold data; the rest of it is refused at the mere mention.
_DATA = {
    "builtins": "object set frozenset list dict tuple int float bool str bytes bytearray complex "
    "slice range NotImplementedType ellipsis unicode long xrange",
    "collections": "OrderedDict defaultdict Counter deque",
    "argparse": "Namespace",
    "types": "SimpleNamespace",
    "datetime": "date time datetime timedelta timezone",
    "pathlib": "Path PurePath PosixPath WindowsPath PurePosixPath PureWindowsPath",
    "pathlib._local": "Path PurePath PosixPath WindowsPath PurePosixPath PureWindowsPath",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "uuid": "UUID",
    "zoneinfo": "ZoneInfo",
    "functools": "partial",
    "copyreg": "_reconstructor __newobj__",
    "_codecs": "encode",
    "re": "_compile Pattern",
    "typing": "Any Union Optional List Dict Tuple Callable Sequence Mapping Type",
    "string": "Template",
    "random": "Random",
}
_DATA |= {"__builtin__": _DATA["builtins"], "copy_reg": _DATA["copyreg"]}
_HARMLESS = {f"{module}.{name}" for module, names in _DATA.items() for name in names.split()}

# Functions of NumPy that rebuild its own values.
_REBUILD = re.compile(
    r"numpy\.(_?core\.(multiarray|numeric)\.(_reconstruct|scalar|_frombuffer)"
    r"|dtype|ndarray|random\._pickle\.__\w+_ctor)"
)
_PYTHON2 = {"__builtin__", "__builtins__", "commands", "copy_reg", "cPickle", "cStringIO"}
_PYTHON2 |= {"urllib2", "popen2", "dummy_thread", "thread", "exceptions", "imp", "distutils"}
_SYSTEM = (set(sys.stdlib_module_names) | _PYTHON2) - {"__main__"}
_PACKAGERS = {"pip", "setuptools", "pkg_resources", "_distutils_hack", "ensurepip", "pytest", "py"}


def is_refused(name: str) -> bool:
    """Whether the mere mention of ``module.name`` ends the reading.

    >>> is_refused("os.system"), is_refused("argparse.Namespace"), is_refused("my.Config")
    (True, False, False)
    """
    if name in _HARMLESS:
        return False
    parts = name.split(".")
    return parts[0] in _SYSTEM | _PACKAGERS or not all(map(_is_word, parts))


def is_data(name: str) -> bool:
    """Whether calling ``module.name`` can be no more than the making of a value.

    >>> is_data("torch.optim.adam.Adam"), is_data("torch.load")
    (True, False)
    """
    last = name.rpartition(".")[2]
    looks_like_a_class = bool(re.match("_*[A-Z]", last))
    return name in _HARMLESS or bool(_REBUILD.fullmatch(name)) or looks_like_a_class


def _is_word(part: str) -> bool:
    """Not ``__getattribute__`` and its like, nor what no name can be."""
    special = part.startswith("__") and part.endswith("__") and part != "__main__"
    return part.isidentifier() and not special
