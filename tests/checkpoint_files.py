"""Checkpoints to open: layouts to be accepted, pickles that must do nothing, other formats."""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import random
import struct
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kappascope.checkpoints.open import Checkpoint

NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.uint8: "U8",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.int16: "I16",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}


# Writers


def raw(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file of any header, right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def contents(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())


def entries(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        end = len(data) + tensor.numel() * tensor.itemsize
        places = [len(data), end]
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": places,
        }
        data += contents(tensor)
    return header, data


def safetensors(tensors: Mapping[str, Tensor]) -> bytes:
    return raw(*entries(tensors))


def saved(value: Any, **options: Any) -> bytes:
    """What ``torch.save`` writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def legacy(value: Any) -> bytes:
    return saved(value, _use_new_zipfile_serialization=False)


def archive(pickled: bytes, storages: Mapping[str, bytes] | None = None, **more: Any) -> bytes:
    """A torch zip archive around any pickle."""
    buffer = io.BytesIO()
    members = {"data.pkl": pickled, "version": b"3\n", "byteorder": b"little"}
    members |= {f"data/{key}": data for key, data in (storages or {}).items()}
    with zipfile.ZipFile(buffer, "w", more.get("compression", zipfile.ZIP_STORED)) as file:
        for name, data in (members | more.get("members", {})).items():
            file.writestr(zipfile.ZipInfo(f"{more.get('root', 'archive')}/{name}"), data)
            if more.get("compression"):
                file.infolist()[-1].compress_type = more["compression"]
    return buffer.getvalue()


def deflated(data: bytes) -> bytes:
    """The same zip archive, packed."""
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(data)) as old,
        zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
    return buffer.getvalue()


def members(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        return {info.filename.partition("/")[2]: file.read(info) for info in file.infolist()}


def unsigned(data: bytes) -> bytes:
    """A zip archive without checksums, as torch writes it if told to: damage gets further."""
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        sums = {struct.pack("<I", info.CRC) for info in file.infolist() if info.CRC}
    for checksum in sums:
        data = data.replace(checksum, bytes(4))
    return data


# Layouts that must be accepted

Layout = Callable[[Path], Path]
BENIGN: dict[str, tuple[Layout, int]] = {}


def benign(count: int) -> Callable[[Layout], Layout]:
    """Make a function that writes a checkpoint one of the layouts; ``count`` tensors are in it."""

    def enter(layout: Layout) -> Layout:
        BENIGN[layout.__name__] = layout, count
        return layout

    return enter


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


def _weights(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"embed.weight": (5, 4), "fc.weight": (4, 4), "fc.bias": (4,)}
    return {k: torch.randn(s, generator=generator).to(dtype) for k, s in shapes.items()}


def _put(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def _file(name: str, count: int, make: Callable[[], bytes], suffix: str = "pt") -> None:
    def layout(folder: Path) -> Path:
        return _put(folder / f"{name}.{suffix}", make())

    layout.__name__ = name
    benign(count)(layout)


def _each(*dtypes: torch.dtype) -> bytes:
    return safetensors({str(dtype): torch.ones(2, 3).to(dtype) for dtype in dtypes})


def _padded() -> bytes:
    header, data = entries(_weights())
    text = json.dumps(header).encode()
    return raw(text + b" " * 7 + b"\n\t", data)


def _long_as_a_pickle_begins() -> bytes:
    header, data = entries(_weights())
    text = json.dumps(header).encode()
    return raw(text.ljust(0x280), data)  # eight bytes of length that begin as protocol 2 does


def _shuffled() -> bytes:
    header, data = entries(_weights())
    return raw(dict(reversed(header.items())), data)


def described(metadata: Any) -> bytes:
    header, data = entries({"w": torch.eye(2)})
    return raw({"__metadata__": metadata, **header}, data)


_S = "safetensors"
_file("single precision", 3, lambda: safetensors(_weights()), _S)
_file("bfloat16", 3, lambda: safetensors(_weights(torch.bfloat16)), _S)
_file("eight bits", 3, lambda: _each(torch.float8_e4m3fn, torch.float8_e5m2, torch.int8), _S)
_file("a scale format", 1, lambda: _each(torch.float8_e8m0fnu), _S)
_file("whole numbers", 4, lambda: _each(torch.int64, torch.uint64, torch.bool, torch.uint8), _S)
_file("complex numbers", 1, lambda: _each(torch.complex64), _S)
_file("a scalar", 1, lambda: safetensors({"s": torch.tensor(2.0)}), _S)
_file("an empty tensor", 2, lambda: safetensors({"e": torch.ones(0, 5), "w": torch.eye(2)}), _S)
_file("a padded header", 3, _padded, _S)
_file("a header as long as a pickle begins", 3, _long_as_a_pickle_begins, _S)
_file("a header in another order", 3, _shuffled, _S)
_file(
    "strange names", 3, lambda: safetensors({n: torch.eye(2) for n in ("重み\n", "\x1b", "")}), _S
)
_file("metadata", 1, lambda: described({"format": "pt"}), _S)
_file("safetensors named as something else", 3, lambda: safetensors(_weights()), "bin")
_file("a plain state dict", 4, lambda: saved(_model().state_dict()))
_file("half precision", 3, lambda: saved(_weights(torch.float16)), "pth")
_file("prefixes", 3, lambda: saved({f"module._orig_mod.{k}": v for k, v in _weights().items()}))
_file("a bare tensor", 1, lambda: saved(torch.eye(3)))
_file("a list of tensors", 2, lambda: saved([torch.eye(3), torch.eye(2)]))
_file("parameters", 1, lambda: saved({"w": nn.Parameter(torch.eye(2))}))
_file("newer formats", 2, lambda: saved({"a": torch.ones(2, 2).to(torch.float8_e4m3fn),
                                         "b": torch.ones(2, dtype=torch.uint16)}))  # fmt: skip
_file("before 1.6", 4, lambda: legacy(_model().state_dict()), "bin")
_file("before 1.6, nested", 4, lambda: legacy({"state_dict": _model().state_dict(), "epoch": 3}))
_file("before 1.6, from a GPU", 4, lambda: legacy(_model().state_dict()).replace(
    b"X\x03\0\0\0cpu", b"X\x06\0\0\0cuda:0"), "pth")  # fmt: skip
_file("protocol 4", 4, lambda: saved(_model().state_dict(), pickle_protocol=4))
_file("protocol 5", 4, lambda: saved(_model().state_dict(), pickle_protocol=5))
_file("packed", 4, lambda: deflated(saved(_model().state_dict())))
_file("without checksums", 4, lambda: unsigned(saved(_model().state_dict())))
_file("plain values beside", 1, lambda: saved(
    {"w": torch.eye(2), "history": [0.5, 0.25], "names": {"a", "b"}, "size": torch.Size([2]),
     "device": torch.device("cpu"), "dtype": torch.float16, "counts": defaultdict(int, a=1),
     "nothing": None, "pair": (1, "x"), "z": 1j.real, "blob": b"\0\1"}))  # fmt: skip


@benign(3)
def views(folder: Path) -> Path:
    whole = torch.arange(24.0).reshape(4, 6)
    path = folder / "views.pt"
    torch.save({"whole": whole, "part": whole[1:, 2:4], "turned": whole.T}, path)
    return path


@benign(2)
def tied_weights(folder: Path) -> Path:
    weight = torch.eye(3)
    path = folder / "tied.bin"
    torch.save({"embed.weight": weight, "head.weight": weight}, path)
    return path


@benign(16)
def with_an_optimizer(folder: Path) -> Path:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    path = folder / "training.ckpt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return path


@benign(4)
def lightning(folder: Path) -> Path:
    path = folder / "epoch=1.ckpt"
    state = {f"net.{key}": value for key, value in _model().state_dict().items()}
    callbacks = {"ModelCheckpoint{'monitor': None}": {"best_model_path": "a.ckpt"}}
    loops = {"fit_loop": {"epoch_progress": {"current": {"ready": 1}}}}
    torch.save(
        {"epoch": 1, "state_dict": state, "callbacks": callbacks, "loops": loops,
         "hyper_parameters": OrderedDict(lr=1e-3), "pytorch-lightning_version": "2.6.0"}, path
    )  # fmt: skip
    return path


@benign(4)
def objects_beside_the_tensors(folder: Path) -> Path:
    path = folder / "objects.ckpt"
    arguments = argparse.Namespace(lr=0.1, sizes=[1, 2])
    beside = {"args": arguments, "score": np.float64(0.5), "path": Path("a")}
    torch.save({"state_dict": _model().state_dict(), "hyper_parameters": beside}, path)
    return path


@benign(4)
def saved_as_code(folder: Path) -> Path:
    path = folder / "code.pt"  # the archive's root is then code/, as the code of TorchScript
    torch.save(_model().state_dict(), path)
    return path


@benign(3)
def a_folder(folder: Path) -> Path:
    _put(folder / "config.json", b'{"hidden_size": 4}')
    return _put(folder / "model.safetensors", safetensors(_weights())).parent


def _sharded(folder: Path, name: str, write: Callable[[dict[str, Tensor]], bytes]) -> Path:
    stem, _, end = name.rpartition(".")
    places = {}
    for i, (key, value) in enumerate(_weights().items(), 1):
        places[key] = f"{stem}-{i:05d}-of-00003.{end}"
        _put(folder / places[key], write({key: value}))
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    _put(folder / f"{name}.index.json", json.dumps(index).encode())
    return folder


@benign(3)
def sharded(folder: Path) -> Path:
    return _sharded(folder, "model.safetensors", safetensors)


@benign(3)
def sharded_pickles(folder: Path) -> Path:
    return _sharded(folder, "pytorch_model.bin", saved)


@benign(3)
def an_index(folder: Path) -> Path:
    return sharded(folder) / "model.safetensors.index.json"


@benign(3)
def shards_without_an_index(folder: Path) -> Path:
    (sharded(folder) / "model.safetensors.index.json").unlink()
    return folder


@benign(1)
def one_shard(folder: Path) -> Path:
    return sharded(folder) / "model-00002-of-00003.safetensors"


@benign(3)
def two_formats(folder: Path) -> Path:
    _put(folder / "pytorch_model.bin", saved({"other": torch.eye(2)}))
    return a_folder(folder)


@benign(4)
def a_pickled_folder(folder: Path) -> Path:
    _put(folder / "training_args.bin", saved({"lr": 0.1}))
    _put(folder / "optimizer.pt", saved({"w": torch.eye(2)}))
    return _put(folder / "pytorch_model.bin", saved(_model().state_dict())).parent


@benign(2)
def an_adapter(folder: Path) -> Path:
    pair = {"lora_A": torch.ones(2, 4), "lora_B": torch.ones(4, 2)}
    return _put(folder / "adapter_model.safetensors", safetensors(pair)).parent


@benign(3)
def a_cache(folder: Path) -> Path:
    revision = folder / "models--a--b" / "snapshots" / "0123abc"
    revision.mkdir(parents=True)
    blob = _put(revision.parents[1] / "blobs" / "9f8e", safetensors(_weights()))
    (revision / "model.safetensors").symlink_to(Path("../../blobs") / blob.name)
    return revision


@benign(3)
def a_cached_repository(folder: Path) -> Path:
    repository = a_cache(folder).parents[1]
    _put(repository / "refs" / "main", b"0123abc")
    return repository


@benign(3)
def a_cached_file(folder: Path) -> Path:
    return a_cache(folder) / "model.safetensors"


@benign(3)
def a_link_that_the_user_made(folder: Path) -> Path:
    (folder / "here.safetensors").symlink_to(a_folder(folder / "elsewhere") / "model.safetensors")
    return folder / "here.safetensors"


@benign(3)
def a_hard_link(folder: Path) -> Path:
    os.link(a_folder(folder / "elsewhere") / "model.safetensors", folder / "model.safetensors")
    return folder


# Pickles that must do nothing. Each makes a file at MARK if anything in it is run.

MARK = "kappascope-was-here"
_CODE = f"open({MARK!r}, 'w').close()"
_SHELL = f"touch {MARK}"
TARGETS: list[tuple[str, str, tuple[Any, ...]]] = [
    *[(m, "system", (_SHELL,)) for m in ("os", "posix", "nt")],
    *[("os", name, (_SHELL,)) for name in ("popen", "execv", "putenv", "mkdir")],
    *[("subprocess", name, (["touch", MARK],)) for name in
      ("Popen", "call", "run", "check_output", "check_call", "getoutput")],
    *[(m, name, (_CODE,)) for m in ("builtins", "__builtin__") for name in ("eval", "exec")],
    *[(m, "open", (MARK, "w")) for m in ("builtins", "__builtin__", "io", "_io", "codecs", "os")],
    *[(m, "open", (MARK, "w")) for m in ("gzip", "bz2", "lzma", "shelve", "dbm", "wave")],
    ("builtins", "compile", (_CODE, "x", "exec")),
    ("builtins", "__import__", ("os",)),
    ("builtins", "getattr", ("", "format")),
    ("builtins", "map", (_CODE, ())),
    ("importlib", "import_module", ("antigravity",)),
    ("importlib.machinery", "SourceFileLoader", ("x", MARK)),
    ("runpy", "run_path", (MARK,)),
    ("timeit", "timeit", (_CODE, "pass")),
    ("code", "InteractiveInterpreter", ()),
    ("pdb", "run", (_CODE,)),
    ("bdb", "Bdb.run", (_CODE,)),
    ("cProfile", "run", (_CODE,)),
    ("profile", "Profile.run", (_CODE,)),
    ("trace", "Trace.run", (_CODE,)),
    ("pty", "spawn", (_SHELL,)),
    ("shutil", "copy", (__file__, MARK)),
    ("pathlib", "Path.touch", (MARK,)),
    ("pathlib", "os.system", (_SHELL,)),
    ("logging", "FileHandler", (MARK,)),
    ("logging.config", "listen", ()),
    ("sqlite3", "connect", (MARK,)),
    ("zipfile", "ZipFile", (MARK, "w")),
    ("tarfile", "TarFile", (MARK, "w")),
    ("tempfile", "mktemp", ()),
    ("ctypes", "CDLL", ("libc.so.6",)),
    ("socket", "create_connection", (("127.0.0.1", 9),)),
    ("urllib.request", "urlopen", ("http://127.0.0.1:9",)),
    ("asyncio", "run", (_CODE,)),
    ("asyncio.unix_events", "_UnixSubprocessTransport._start", (_SHELL,)),
    ("multiprocessing.util", "spawnv_passfds", (_SHELL,)),
    ("pickle", "loads", (b"cos\nsystem\n.",)),
    ("_pickle", "loads", (b"cos\nsystem\n.",)),
    ("marshal", "loads", (b"\0",)),
    ("types", "FunctionType", (_CODE,)),
    ("types", "CodeType", ()),
    ("operator", "methodcaller", ("touch",)),
    ("operator", "attrgetter", ("system",)),
    ("functools", "reduce", (_CODE,)),
    ("itertools", "starmap", (_CODE,)),
    ("sys", "settrace", (_CODE,)),
    ("site", "main", ()),
    ("pip", "main", (["install", "x"],)),
    ("idlelib.run", "Executive.runcode", (_CODE,)),
    ("lib2to3.pgen2.grammar", "Grammar.loads", (_CODE,)),
    ("distutils.file_util", "write_file", (MARK, ["x"])),
    ("torch", "load", (MARK,)),
    ("torch", "save", (1, MARK)),
    ("torch.serialization", "load", (MARK,)),
    ("torch.serialization", "save", (1, MARK)),
    ("torch.hub", "load", ("a/b", "c")),
    ("torch.jit", "load", (MARK,)),
    ("torch.storage", "_load_from_bytes", (b"",)),
    ("torch.utils.collect_env", "run", (_SHELL,)),
    ("torch.utils.cpp_extension", "load_inline", ("x", _CODE)),
    ("torch._inductor.codecache", "compile_file", (_SHELL, MARK, ["touch"])),
    ("torch.package", "PackageExporter", (MARK,)),
    ("torch.utils.tensorboard", "SummaryWriter", (MARK,)),
    ("torch.multiprocessing", "spawn", (_CODE,)),
    ("torch.fx.experimental.symbolic_shapes", "eval", (_CODE,)),
    ("numpy", "save", (MARK, 1)),
    ("numpy", "load", (MARK,)),
    ("numpy", "fromfile", (MARK,)),
    ("numpy", "memmap", (MARK,)),
    ("numpy.testing._private.utils", "runstring", (_CODE, {})),
    ("numpy.f2py.crackfortran", "myeval", (_CODE,)),
    ("joblib", "load", (MARK,)),
    ("pandas", "read_pickle", (MARK,)),
    ("dill", "loads", (b"",)),
    ("cloudpickle.cloudpickle", "_make_function", (_CODE,)),
    ("__main__", "run", (_CODE,)),
    ("sklearn.utils._testing", "eval", (_CODE,)),
]  # fmt: skip


def _value(value: Any, protocol: int) -> bytes:
    """Opcodes that push a plain value, in the words of a protocol."""
    if isinstance(value, str):
        return f"S{value!r}\n".encode() if protocol < 2 else b"X" + _sized(value.encode(), "<I")
    return pickle.dumps(value, min(protocol, 2))[2 if protocol >= 2 else 0 : -1]


def _sized(data: bytes, layout: str) -> bytes:
    return struct.pack(layout, len(data)) + data


def _name(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _stacked(module: str, name: str) -> bytes:
    return b"".join(b"\x8c" + _sized(t.encode(), "<B") for t in (module, name)) + b"\x93"


def _given(given: tuple[Any, ...], protocol: int) -> bytes:
    return b"(" + b"".join(_value(value, protocol) for value in given) + b"t"


def _instance(module: str, name: str, given: bytes) -> bytes:
    return given[:-1] + f"i{module}\n{name}\n".encode()


def _setstate(function: bytes, given: bytes) -> bytes:
    """An object whose ``__setstate__`` is the function."""
    made = _name("types", "SimpleNamespace") + b")R"
    return made + b"}(S'__setstate__'\n" + function + b"ub" + given + b"b"


def _looked_up(module: str, name: str, given: bytes) -> bytes:
    """``getattr(__import__(module), name)(*given)``."""
    imported = _name("builtins", "__import__") + f"(S'{module}'\ntR".encode()
    found = _name("builtins", "getattr") + b"(" + imported + f"S'{name}'\ntR".encode()
    return found + given + b"R"


def _styles(module: str, name: str, given: bytes) -> list[bytes]:
    """Every way a pickle has to call ``module.name``."""
    plain, stacked = _name(module, name), _stacked(module, name)
    kept = plain + b"q\x05" + b"0h\x05"
    typed = _name("torch._tensor", "_rebuild_from_type_v2") + b"(" + plain
    typed += _name("torch", "Tensor") + given + b"}tR"
    inside = _name("collections", "OrderedDict") + b")R(S'k'\n" + plain + given + b"Ru"
    return [
        plain + given + b"R",
        stacked + given + b"R",
        kept + given + b"R",
        _instance(module, name, given),
        given[:1] + plain + given[1:-1] + b"o",
        plain + given + b"\x81",
        plain + given + b"}\x92",
        _setstate(plain, given),
        _looked_up(module, name, given),
        _name("functools", "partial") + b"(" + plain + given[1:] + b"R)R",
        typed,
        inside,
        b"(" + plain + given + b"R0N" + b"t",
        _name("collections", "defaultdict") + b"(" + plain + b"tR",
        _name("torch._utils", "_rebuild_parameter") + b"(" + plain + given + b"RI00\n}tR",
        _name("copyreg", "_reconstructor") + b"(" + plain + plain + b"NtR" + given + b"b",
        b"]" + plain + given + b"Ra",
        plain + b"\x8f(" + plain + given + b"R\x90",
    ]


def hostile(count: int, seed: int = 0) -> Iterator[bytes]:
    """Files with a pickle that asks for something to be run: every style before any comes twice."""
    random_ = random.Random(seed)
    magic = b"".join(pickle.dumps(v, 2) for v in (0x1950A86A20F9469CFC6C, 1001, {}))
    tensor = members(saved({"w": torch.eye(2)}))
    for i in range(count):
        module, name, arguments = TARGETS[i % len(TARGETS)]
        protocol = random_.randrange(6)
        styles = _styles(module, name, _given(arguments, protocol))
        style = styles[(i // len(TARGETS) + i) % len(styles)]
        if i % 97 == 96:
            style = b"\x82\x01"  # the registry of extensions
        head = bytes([0x80, protocol]) if protocol >= 2 else b""
        if protocol >= 4:
            head += b"\x95" + struct.pack("<Q", len(style) + 1)
        body = head + style + b"."
        beside = b"\x80\x02}(X\x01\0\0\0a" + style + tensor["data.pkl"][4:-1] + b"."
        yield random_.choice(
            [body, magic + body, archive(body), archive(beside, {"0": tensor["data/0"]})]
        )


# What the tests of several files share

TWO = {"a": torch.eye(2), "b": torch.ones(3)}
HEADER, DATA = entries(TWO)
SOUND = raw(HEADER, DATA)


def put(folder: Path, data: bytes, name: str = "x.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)
    return folder / name


def everything(
    checkpoint: Checkpoint, node: Any = None, at: tuple[str, ...] = ()
) -> dict[str, Tensor]:
    """All tensors by the path to them."""
    found: dict[str, Tensor] = {}
    for key, value in (checkpoint.contents if node is None else node).items():
        if isinstance(value, dict):
            found |= everything(checkpoint, value, (*at, key))
        elif isinstance(value, Tensor):
            found[".".join((*at, key))] = checkpoint.read((*at, key))
    return found


NOT_SAFETENSORS = {
    "Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
    "HTML": b"<!DOCTYPE html><html>404</html>",
    "XML": b"<?xml version='1.0'?><Error/>",
    "gzip": b"\x1f\x8b\x08" + bytes(40),
    "zip archive": saved(TWO),
    "pickle": pickle.dumps({"size": 3}, 2),
    "ONNX": b"\x08\x08\x12\x07pytorch\x1a\x042.13:\x02" + bytes(9),
    "HDF5": b"\x89HDF\r\n\x1a\n" + bytes(40),
    "tar": bytes(257) + b"ustar\x0000" + bytes(300),
    "TensorFlow Lite": b"\x1c\0\0\0TFL3" + bytes(40),
    "JSON": b'{"error": "Entry not found"}',
    "zeros": bytes(1000),
    "PDF": b"%PDF-1.7\n",
    "image": b"\x89PNG\r\n",
}
