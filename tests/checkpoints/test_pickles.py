"""Pickles are read, never run."""

import io
import pickle
import pickletools
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import broken_files
import checkpoint_files
from broken_files import refused
from checkpoint_files import MARK, archive, put
from kappascope.checkpoints import pickles
from kappascope.checkpoints.formats import Malformed
from kappascope.checkpoints.pickles import DictItems, ForbiddenCall, ForeignObject, GlobalName
from kappascope.checkpoints.rebuild import BUILDERS, pickled_storage

PROTOCOLS = range(6)


def load(data: bytes) -> Any:
    return pickles.load(data, BUILDERS, pickled_storage).value


def plain(value: Any) -> Any:
    """A value of the machine as Python would have it."""
    if isinstance(value, DictItems):
        return {plain(key): plain(item) for key, item in value}
    if isinstance(value, list | tuple):
        return type(value)(plain(item) for item in value)
    return value


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8"))
)
KEYS = st.text("ab\n'\\é", max_size=3)
VALUES = st.recursive(
    SCALARS | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner),
    max_leaves=12,
)


@settings(max_examples=150)
@given(VALUES, st.sampled_from(PROTOCOLS))
@example(b"", 2)  # a call of bytes() without anything, once taken for a foreign object
def test_plain_values_come_back_as_pickle_itself_has_them(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    if protocol < 3:  # bytes are then text in latin-1, which nothing here needs
        value = _texts(value)
    assert plain(load(data)) == value


def _texts(value: Any) -> Any:
    match value:
        case bytes():
            return value.decode("latin1")
        case dict():
            return {key: _texts(item) for key, item in value.items()}
        case list() | tuple():
            return type(value)(_texts(item) for item in value)
    return value


def test_every_opcode_is_known() -> None:
    known = {chr(code) for code in pickles._OPCODES} | {"."}
    assert known == {opcode.code for opcode in pickletools.opcodes}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_is_shared_stays_shared(protocol: int) -> None:
    inner = [1]
    first, second = load(pickle.dumps([inner, inner], protocol))
    assert first is second


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_ordered_dict_is_built(protocol: int) -> None:
    data = pickle.dumps(OrderedDict(b=1, a=[2]), protocol)
    assert load(data) == [("b", 1), ("a", [2])]


class Foreign:
    """Of a class that the reader cannot know."""

    def __init__(self) -> None:
        self.size = 3


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_object_becomes_inert_and_keeps_its_attributes(protocol: int) -> None:
    it = load(pickle.dumps(Foreign(), protocol))
    assert isinstance(it, ForeignObject)
    assert (it.kind, it.state) == (f"{__name__}.Foreign", [("size", 3)])


def test_a_reference_to_a_function_is_a_name() -> None:
    assert load(b"cmy.losses\nsoft\n.") == GlobalName("my.losses.soft")


def test_a_call_of_an_unknown_function_is_refused_by_name() -> None:
    with pytest.raises(ForbiddenCall, match=r"my\.losses\.soft"):
        load(b"cmy.losses\nsoft\n)R.")


BITE = (
    ("os", "system"),
    ("posix", "system"),
    ("builtins", "eval"),
    ("builtins", "exec"),
    ("io", "open"),
)


@pytest.mark.parametrize("style", range(5))
def test_the_hostile_pickles_do_bite(
    style: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control: run as Python would, they leave their mark."""
    monkeypatch.chdir(tmp_path)
    module, name = BITE[style]
    arguments = next(a for m, n, a in checkpoint_files.TARGETS if (m, n) == (module, name))
    pickled = (
        checkpoint_files._styles(module, name, checkpoint_files._given(arguments, 2))[style] + b"."
    )
    made = pickle.loads(b"\x80\x04" + pickled)  # a shell command that touches a file in tmp_path
    if isinstance(made, io.IOBase):
        made.close()
    assert (tmp_path / MARK).exists()


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(("module", "name"), BITE)
def test_every_way_to_call_is_refused_and_names_what_it_asks_for(
    module: str, name: str, protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = next(a for m, n, a in checkpoint_files.TARGETS if (m, n) == (module, name))
    head = bytes([0x80, protocol]) if protocol > 1 else b""
    for style in checkpoint_files._styles(
        module, name, checkpoint_files._given(arguments, protocol)
    ):
        with pytest.raises(
            ForbiddenCall, match=rf"'(builtins\.__import__|builtins\.getattr|{module}\.{name})'"
        ):
            load(head + style + b".")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("target", checkpoint_files.TARGETS, ids=lambda t: f"{t[0]}.{t[1]}")
def test_no_target_is_taken_for_data(target: tuple[str, str, Any]) -> None:
    name = f"{target[0]}.{target[1]}"
    foreign_class = name.startswith("torch.") and target[1][0].isupper()  # inert, and so harmless
    assert pickles.is_refused(name) or not pickles.is_data(name) or foreign_class


@pytest.mark.parametrize(
    "name",
    ["argparse.Namespace", "omegaconf.dictconfig.DictConfig", "numpy._core.multiarray.scalar",
     "pytorch_lightning.utilities.parsing.AttributeDict", "torch.nn.modules.linear.Linear",
     "pathlib.PosixPath", "__main__.Config", "numpy.random._pickle.__randomstate_ctor"],
)  # fmt: skip
def test_data_of_foreign_classes_passes(name: str) -> None:
    assert not pickles.is_refused(name)
    assert pickles.is_data(name)


@pytest.mark.parametrize("code", [b"\x82\x01", b"\x83\x01\0", b"\x84\x01\0\0\0", b"\x97", b"\x98"])
def test_extensions_and_outside_buffers_are_refused(code: bytes) -> None:
    with pytest.raises(Malformed, match="a pickle"):
        load(code + b".")


@pytest.mark.parametrize(
    "data",
    [b"", b".", b"0.", b"t.", b"a.", b"R.", b"Nb", b"h\0.", b"g-1\n.", b"Q.", b"(I1\nd.",
     b"\x80\x09N.", b"\xff.", b"Ixyz\n.", b"S'a\n.", b"Sa\n.", b"F\n.", b"X\xff\xff\xff\xffa.",
     b"\x8e" + b"\xff" * 8 + b".", b"\x8b\xff\xff\xff\xff.", b"T\xff\xff\xff\xffa.", b"c\n\n.",
     b"I" + b"9" * 5000 + b"\n.", b"\x93.", b"NN\x93.", b"NN\x81.", b"N)R.", b"K\1K\1s.", b"(.",
     b"1.",
     b"ctorch._utils\n_rebuild_tensor_v2\n)R.", b"ctorch\nSize\n(NtR.", b"ctorch\ndevice\n(]tR.",
     b"ccollections\nOrderedDict\n(K\1tR.", b"ctorch._utils\n_rebuild_tensor_v3\n(NNNNNNtR.",
     b"ctorch.serialization\n_get_layout\n(}tR.", b"(NNNNQ.", b"(X\7\0\0\0storageNNNNtQ.",
     b"ccopyreg\n_reconstructor\n(NNNtR.", b"}(NNNu.", b"Pabc\n."],
)  # fmt: skip
def test_a_damaged_pickle_is_refused_in_words(data: bytes) -> None:
    with pytest.raises(Malformed) as refusal:
        load(data)
    assert refusal.value.wrong
    assert refusal.value.advice


# What costs a reader its memory or time


def test_declared_lengths_cost_nothing() -> None:
    for code, layout in (
        (b"X", "<I"),
        (b"\x8d", "<Q"),
        (b"B", "<I"),
        (b"\x8e", "<Q"),
        (b"\x96", "<Q"),
    ):
        with pytest.raises(Malformed):
            load(code + struct.pack(layout, 2**32 - 1) + b"x.")


def test_nesting_without_end_does_not_overflow() -> None:
    deep = load(b"N" + b"\x85" * 200_000 + b".")
    assert isinstance(deep, tuple)


def test_a_name_of_two_long_texts_is_refused() -> None:
    long = b"X" + struct.pack("<I", 10_000) + b"a" * 10_000
    with pytest.raises(Malformed):
        load(long + long + b"\x93.")


def test_the_items_of_a_dict_are_taken_and_not_copied() -> None:
    items = b"](K\1K\2\x86K\3K\4\x86eq\0"
    twice = b"(" + items + b"0" + 2 * b"ccollections\nOrderedDict\nh\0\x85R" + b"t."
    assert load(twice) == ([(1, 2), (3, 4)], [])


def test_too_many_steps_end_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickles, "MOST_STEPS", 1000)
    with pytest.raises(Malformed, match="steps"):
        load(b"N0" * 1000 + b"N.")


def test_half_a_surrogate_is_escaped() -> None:
    assert load(pickle.dumps("a\ud800b", 2)) == "a\\xed\\xa0\\x80b"
    assert load(b"V\\ud800\n.") == "\\xed\\xa0\\x80"


# Files of hostile pickles: the cases A13 and A22 of the fault contract


def test_a13_and_a22_hostile_pickles_are_refused_and_nothing_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    broken_files.warm_up()
    tally = broken_files.run("hostile", checkpoint_files.hostile(400, seed=5), tmp_path / "x.pt")
    assert (tally.count, tally.refused, tally.crashes, tally.executions) == (400, 400, [], [])
    assert [path.name for path in tmp_path.iterdir()] == ["x.pt"]


def test_a13_the_global_is_named(tmp_path: Path) -> None:
    hostile = b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R."
    for data in (
        hostile,
        archive(hostile),
        archive(b"cposix\nsystem\n(S'true'\ntR."),
        b"cposix\nsystem\n.",
    ):
        refused(put(tmp_path, data, "x.pt"), "asks for 'posix.system'")


def test_what_joblib_wrote_is_called_so() -> None:
    """Its arrays stand between the opcodes; such a file was called damaged."""
    written = b"\x80\x03cjoblib.numpy_pickle\nNumpyArrayWrapper\n)\x81}b" + b"\xff" * 64
    with pytest.raises(Malformed, match="a pickle of joblib"):
        pickles.load(written, BUILDERS, pickled_storage)
