"""Compare two checkpoints layer by layer: what is the same, rounded, rearranged, trained, damaged.

Matrices are matched by name where names can be (:mod:`kappascope.model.counterparts`), and what is
left by its values: joined projections by the rows of which they are made, tied heads by the table
that they repeat. An order of rows or a scale that another layer undoes is harmless; one that
nothing undoes is damage.

>>> import torch
>>> weight = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
>>> before, after = {"model.fc.weight": weight}, {"fc.weight": weight.bfloat16()}
>>> [(row.name, row.verdict, row.text) for row in diff(before, after).layers]
[('fc.weight', 'rounding', 'rounded to bfloat16')]
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from kappascope.clinic.diagnose import Case, Selection, case
from kappascope.clinic.examination import json_value
from kappascope.clinic.source import InMemory, Location, OnDisk, Opened, Readable, Source
from kappascope.matrix.alterations import Alteration, alteration
from kappascope.matrix.arrangements import (
    Arrangement,
    arrangement,
    assembly,
    head_sizes,
    pairs_of_halves,
    same_singular_values,
)
from kappascope.matrix.precision import Rounding
from kappascope.model.counterparts import (
    Counterparts,
    Renames,
    as_hugging_face,
    without_wrappers,
)
from kappascope.model.matrices import Logical, Unit
from kappascope.model.names import depth, stored
from kappascope.model.skipped import Skipped, unreadable
from kappascope.refusal import Refusal
from kappascope.system import files
from kappascope.system.memory import LIBRARY_BYTES, bytes_of, is_out_of_memory
from kappascope.system.workers import CORES, Done, Processes
from kappascope.text import error_text, first_few, plural

Verdict: TypeAlias = Literal[
    "same", "rounding", "rearranged", "trained", "added", "replaced", "missing", "damaged"
]
"""What became of a layer, the mildest first."""
DIFF_SCHEMA = "kappascope.diff/1"
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
HARMLESS = ("same", "rounding")
TOKENS = ("embedding", "head")  # kinds whose rows are tokens
CERTAIN = 0.9  # cosine from which on an order of lines is not due to chance
TIED = 0.99  # cosine of a head with the table that it repeats, at least
COPIES = 8  # in float64 of both sides, with room for what is compared


@dataclass(frozen=True)
class Operation:
    """Something done to the lines of a matrix, which another may undo: an order, or factors."""

    what: Literal["order", "factors"]
    axis: int | None  # 0 rows, 1 columns, None all entries alike
    values: Tensor

    def undoes(self, other: Operation) -> bool:
        """Tell whether one is the inverse of the other, for lines that meet."""
        if self.what != other.what or self.values.shape != other.values.shape:
            return False
        if self.what == "order":
            return torch.equal(self.values, other.values)
        product = self.values * other.values
        return bool((product - 1).abs().max() < 0.02)  # in bfloat16 each factor is known to 0.004


@dataclass(frozen=True)
class ComparedLayer:
    """One layer of two checkpoints: what it is called in both, and what became of it."""

    name: str
    before: str
    verdict: Verdict
    text: str = ""
    shape: tuple[int, ...] = ()
    kind: str = "other"
    depth: int | None = None
    distance: float | None = None
    cosine: float | None = None
    operations: tuple[Operation, ...] = field(default=(), repr=False)
    digests: tuple[str, str] = field(default=("", ""), repr=False)  # of the values before and after
    vectors: tuple[Tensor, ...] = field(default=(), repr=False)  # before and after, if reordered

    def document(self) -> dict[str, Any]:
        """Return the row as strict JSON values.

        >>> ComparedLayer("fc.weight", "fc.weight", "same").document()["verdict"]
        'same'
        """
        own = {"operations", "digests", "vectors"}
        return {key: json_value(it) for key, it in vars(self).items() if key not in own}


@dataclass(frozen=True)
class Diff:
    """All layers of two checkpoints, what moved most first within a verdict."""

    source: str
    reference: str
    layers: tuple[ComparedLayer, ...] = ()
    notes: tuple[str, ...] = ()
    failed: tuple[Skipped, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def counts(self) -> dict[str, int]:
        """How many layers there are of every verdict, the mildest first."""
        counted = Counter(layer.verdict for layer in self.layers)
        return {verdict: counted[verdict] for verdict in VERDICTS}

    @property
    def ranked(self) -> tuple[ComparedLayer, ...]:
        """The layers, the gravest first, and of equally grave ones what moved most."""
        return tuple(
            sorted(
                self.layers,
                key=lambda layer: (VERDICTS.index(layer.verdict), layer.distance or 0.0),
                reverse=True,
            )
        )

    @property
    def verdict(self) -> str:
        """One sentence that counts the layers.

        >>> Diff("b.pt", "a.pt").verdict
        'Nothing could be compared.'
        """
        if not self.layers:
            return "Nothing could be compared."
        said = [f"{many} {verdict}" for verdict, many in reversed(self.counts.items()) if many]
        return f"{plural(len(self.layers), 'layer')}: {', '.join(said)}."

    def above(self, verdict: str) -> tuple[ComparedLayer, ...]:
        """Return the layers of this verdict or a graver one."""
        least = VERDICTS.index(verdict)
        return tuple(x for x in self.ranked if VERDICTS.index(x.verdict) >= least)

    def document(self) -> dict[str, Any]:
        """Return all of it as strict JSON values."""
        return {
            "schema": DIFF_SCHEMA,
            "source": self.source,
            "reference": self.reference,
            "layers": [layer.document() for layer in self.layers],
            "failed": [{"name": each.name, "reason": str(each.reason)} for each in self.failed],
            "summary": {"by_verdict": self.counts, "verdict": self.verdict},
            "provenance": {
                **files.environment(),
                "dtype": "float64",
                **self.settings,
                "notes": list(self.notes),
            },
        }


# --- one layer of both models ---------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """The tensors of one depth on both sides, and which of their matrices have the same name."""

    before: tuple[Unit, ...]
    after: tuple[Unit, ...]
    names: Mapping[str, str]  # of matrices after, to those before

    @property
    def bytes(self) -> int:
        """The bytes of all its matrices in float64."""
        wholes = [unit.parts[0] for unit in (*self.before, *self.after)]
        return 8 * sum(math.prod(whole.shape) for whole in wholes)


@dataclass(frozen=True)
class _Matrix:
    """A matrix with its values, and the code in which it is stored."""

    part: Logical
    values: Tensor
    code: Rounding | None = None

    @property
    def name(self) -> str:
        return self.part.name

    def row(self, before: str, verdict: Verdict, text: str) -> ComparedLayer:
        part = self.part
        return ComparedLayer(part.name, before, verdict, text, part.shape, part.kind, part.depth)


Told: TypeAlias = ComparedLayer | Skipped


@dataclass(frozen=True)
class _GroupOrder:
    """A group and where its tensors are, to be compared in whichever process."""

    group: Group
    before: Readable
    after: Readable

    def layers(self) -> list[Told]:
        failed: list[Skipped] = []
        before = dict(_read(self.before.opened(), self.group.before, failed))
        after = dict(_read(self.after.opened(), self.group.after, failed))
        lost = {stored(each.name) for each in failed}
        names = {
            new: old for new, old in self.group.names.items() if new in after and old in before
        }
        group = Group(
            tuple(unit for unit in self.group.before if unit.parts[0].name in before),
            tuple(unit for unit in self.group.after if unit.parts[0].name in after),
            names,
        )
        excused = {
            x for pair in self.group.names.items() for x in pair if {*map(stored, pair)} & lost
        }
        rows = (row for row in _compared_group(group, before, after))
        return [*failed, *(row for row in rows if (row.name or row.before) not in excused)]


def _read(
    opened: Opened, units: Iterable[Unit], failed: list[Skipped]
) -> Iterator[tuple[str, _Matrix]]:
    """Yield the matrices of tensors; one that cannot be read costs no other."""
    for unit in units:
        try:
            codes = opened.roundings(unit)
            pairs = list(unit.matrices(opened.read))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            wrong = error.wrong if isinstance(error, Refusal) else error_text(error)
            failed.append(Skipped(unit.parts[0].name, unreadable(wrong)))
            continue
        for part, values in pairs:
            yield part.name, _Matrix(part, values, codes.get(part.name))


def _compared_group(
    group: Group, before: Mapping[str, _Matrix], after: Mapping[str, _Matrix]
) -> Iterator[ComparedLayer]:
    """Compare what has the same name, then what has the same values."""
    left = {unit.parts[0].name: before[unit.parts[0].name] for unit in group.before}
    new = []
    for unit in group.after:
        whole, *parts = (part for part in unit.parts)
        matched = [whole] if whole.name in group.names else parts
        matched = [part for part in matched if part.name in group.names]
        for part in matched:
            other = before[group.names[part.name]]
            yield _compared(other, after[part.name])
            left.pop(other.part.whole or other.name, None)
        if not matched:
            new.append(after[whole.name])
    used: set[str] = set()
    for matrix in new:
        layer, sources = (
            _repeating(matrix, after.values(), before, group.names)
            or _renamed(matrix, left.values())
            or _assembled(matrix, left.values())
            or (matrix.row("", "added", "not in the first"), ())
        )
        used |= {*sources}
        yield layer
    for name, matrix in left.items():
        if name in used:
            continue
        table = _table_of(matrix, before.values())
        if table is not None:
            text = f"a copy of {table.name} before, which stands for both now"
            yield replace(matrix.row(name, "same", text), name="")
        else:
            yield replace(matrix.row(name, "missing", "not in the second"), name="")


def _table_of(head: _Matrix, matrices: Iterable[_Matrix]) -> _Matrix | None:
    """Return the table of tokens that a head repeats, if it does."""
    for table in matrices:
        is_table = table.part.kind == "embedding" and table.part.shape == head.part.shape
        if is_table and head.name != table.name and _cosine(head.values, table.values) > TIED:
            return table
    return None


def _cosine(one: Tensor, other: Tensor) -> float:
    a, b = one.double().flatten(), other.double().flatten()
    return float(torch.cosine_similarity(a, b, dim=0))


def _is_finite(values: Tensor) -> bool:
    """Tell whether all are numbers; in float64, for torch cannot tell it of eight bits."""
    return bool(values.double().isfinite().all())


def _repeating(
    head: _Matrix,
    after: Iterable[_Matrix],
    before: Mapping[str, _Matrix],
    names: Mapping[str, str],
) -> tuple[ComparedLayer, tuple[str, ...]] | None:
    """Recognise a head that repeats the table with which it was tied before."""
    table = _table_of(head, after)
    if table is None or table.name not in names:
        return None
    layer = _compared(before[names[table.name]], head)
    return replace(layer, text=_joined(f"a copy of {table.name}, tied before", layer.text)), ()


def _renamed(
    matrix: _Matrix, left: Iterable[_Matrix]
) -> tuple[ComparedLayer, tuple[str, ...]] | None:
    """Recognise a matrix of another name by its values."""
    for other in left:
        if sorted(other.part.shape) != sorted(matrix.part.shape):
            continue
        layer = _compared(other, matrix)
        if layer.verdict in ("same", "rounding", "rearranged"):
            return replace(layer, text=_joined(f"called {other.name} before", layer.text)), (
                other.name,
            )
    return None


def _assembled(
    matrix: _Matrix, left: Iterable[_Matrix]
) -> tuple[ComparedLayer, tuple[str, ...]] | None:
    """Recognise a matrix that is made of the rows, or the columns, of others."""
    for axis in (0, 1):
        whole = matrix.values if axis == 0 else matrix.values.mT
        pool = [other for other in left if other.values.shape[1 - axis] == whole.shape[1]]
        rows = [other.values if axis == 0 else other.values.mT for other in pool]
        found = assembly(rows, whole) if pool and _is_finite(matrix.values) else None
        if found is None:
            continue
        joined = torch.cat([each.double() for each in rows])[found.rows]
        dtype = max((pool[k].values.dtype for k in found.sources), key=lambda d: -d.itemsize)
        became = alteration(joined.to(dtype), whole, (None, _turned(matrix.code, axis)))
        sources = tuple(pool[k].name for k in found.sources)
        part = len(found.rows) < sum(len(rows[k]) for k in found.sources)
        text = f"{'a part' if part else 'made'} of {first_few(sources)}"
        text += ", interleaved by head" if found.interleaved else ""
        plain: Verdict = "rearranged" if became.kind in HARMLESS else _plain(became)
        layer = matrix.row(" + ".join(sources), plain, _joined(text, became.text))
        return replace(layer, distance=became.distance, cosine=became.cosine), sources
    return None


def _turned(code: Rounding | None, axis: int) -> Rounding | None:
    return code if code is None or axis == 0 else Rounding(code.code, code.half_steps.mT)


def _joined(*texts: str) -> str:
    return "; ".join(text for text in texts if text)


def _plain(became: Alteration) -> Verdict:
    """Return the verdict on a change, where nothing else can undo a scale."""
    return "damaged" if became.kind == "scaled" else became.kind


def _compared(before: _Matrix, after: _Matrix) -> ComparedLayer:
    """Compare two matrices that should be one."""
    a, b = before.values, after.values
    if a.shape[1] == b.shape[1] and a.shape[0] != b.shape[0] and after.part.kind in TOKENS:
        return _resized(before, after)
    if sorted(a.shape) != sorted(b.shape):
        shapes = f"{tuple(a.shape)} became {tuple(b.shape)}"
        return after.row(before.name, "replaced", f"another shape: {shapes}")
    finite = _is_finite(a) and _is_finite(b)
    found = arrangement(a, b) if finite and a.any() and b.any() else Arrangement(a.shape != b.shape)
    is_certain = found and _cosine(found.applied(a), b) > CERTAIN
    if finite and not is_certain and same_singular_values(a, b):
        text = "another basis: it has the same singular values"
        return after.row(before.name, "rearranged", text)
    found = found or Arrangement(a.shape != b.shape)
    code = before.code and Rounding(before.code.code, found.applied(before.code.half_steps))
    is_table = after.part.kind == "embedding"
    became = alteration(found.applied(a), b, (code, after.code), is_table=is_table)
    verdict: Verdict = "rearranged" if became.kind == "scaled" else became.kind
    stored_as = ""
    if before.part.whole and not after.part.whole:
        stored_as = f"split from {before.part.whole}"
    elif after.part.whole and not before.part.whole:
        stored_as = f"fused into {after.part.whole}"
    if (found.text or stored_as) and became.kind in HARMLESS:
        verdict = "rearranged"
    layer = after.row(before.name, verdict, _joined(stored_as, found.text, became.text))
    return replace(
        layer,
        distance=became.distance,
        cosine=became.cosine,
        operations=tuple(_operations(found, became)),
        digests=(_digest(a), _digest(b)),
    )


def _resized(before: _Matrix, after: _Matrix) -> ComparedLayer:
    """Compare the rows that both tables of tokens have."""
    few, many = sorted((len(before.values), len(after.values)))
    became = alteration(before.values[:few], after.values[:few], is_table=True)
    did = "added" if len(after.values) == many else "removed"
    text = _joined(f"{plural(many - few, 'row')} {did}", became.text or "the others are the same")
    verdict: Verdict = "trained" if became.kind in HARMLESS else _plain(became)
    layer = after.row(before.name, verdict, text)
    return replace(layer, distance=became.distance, cosine=became.cosine)


def _operations(found: Arrangement, became: Alteration) -> Iterator[Operation]:
    """Yield what only another layer can undo; the order of a rotary embedding is a convention."""
    for axis, order in ((0, found.rows), (1, found.columns)):
        if order is not None and not Arrangement(rows=order).is_rotary:
            yield Operation("order", axis, order)
    if became.factors is not None:
        yield Operation("factors", became.axis, became.factors)


def _digest(matrix: Tensor) -> str:
    exact = matrix.double().contiguous()
    return hashlib.blake2b(exact.numpy(force=True).tobytes(), digest_size=16).hexdigest()


# --- vectors --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _VectorOrder:
    """The biases and gains of both models, which are small enough to be compared together."""

    before: Readable | InMemory
    after: Readable | InMemory
    counterparts: Counterparts
    selection: Selection

    def layers(self) -> list[Told]:
        failed: list[Skipped] = []
        before, after = (_vectors(side.opened(), failed) for side in (self.before, self.after))
        after = {name: it for name, it in after.items() if self.selection.takes(name)}
        left = {as_hugging_face(without_wrappers(name)): name for name in before}
        rows: list[Told] = [*failed]
        new = []
        for name, vector in after.items():
            there = self.counterparts.there(as_hugging_face(name))
            key = as_hugging_face(without_wrappers(there))
            other = left.pop(key, None)
            if other is None:
                new.append(name)
            else:
                rows.append(_compared_vectors(name, other, before[other], vector))
        spare = [name for name in left.values() if self.selection.takes(name)]
        for name in new:
            made = _joined_vectors(name, after[name], spare, before)
            if made is not None:
                rows.append(made)
                spare = [each for each in spare if each not in made.before.split(" + ")]
            elif is_parameter(name):
                rows.append(_vector_row(name, "", after[name], "added", "not in the first"))
        for name in filter(is_parameter, spare):
            row = _vector_row(name, name, before[name], "missing", "not in the second")
            rows.append(replace(row, name=""))
        return rows


def is_parameter(name: str) -> bool:
    """Tell whether a vector of this name is trained, and not a buffer that a program makes.

    >>> is_parameter("norm.weight"), is_parameter("rotary_emb.inv_freq")
    (True, False)
    """
    return name.rpartition(".")[2] in ("weight", "bias", "gamma", "beta", "scale")


def _vectors(opened: Opened, failed: list[Skipped]) -> dict[str, Tensor]:
    found = {}
    for name, path in opened.vectors.items():
        try:
            vector = opened.read(path)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            wrong = error.wrong if isinstance(error, Refusal) else error_text(error)
            failed.append(Skipped(name, unreadable(wrong)))
            continue
        if vector.is_floating_point() and vector.numel() > 1:
            found[name] = vector
    return found


def _vector_row(name: str, other: str, it: Tensor, verdict: Verdict, text: str) -> ComparedLayer:
    return ComparedLayer(name, other, verdict, text, tuple(it.shape), "vector", depth(name))


def _compared_vectors(name: str, other: str, before: Tensor, after: Tensor) -> ComparedLayer:
    """Compare two vectors: as matrices of one row, and in the ways in which only vectors differ."""
    if before.numel() != after.numel():
        shapes = f"{tuple(before.shape)} became {tuple(after.shape)}"
        return _vector_row(name, other, after, "replaced", f"another shape: {shapes}")
    a, b = before.reshape(1, -1), after.reshape(1, -1)
    was, now = a.double().flatten(), b.double().flatten()  # torch compares no floats of eight bits
    for sign, said in ((1, "one is added to it"), (-1, "one is taken from it")):
        if torch.equal((was + sign).to(b.dtype).double(), now):
            return _vector_row(name, other, after, "rearranged", said)
    for size in head_sizes(len(was)):
        for order in (pairs_of_halves(len(was), size), pairs_of_halves(len(was), size).argsort()):
            if torch.equal(was[order], now) and not torch.equal(was, now):
                text = Arrangement(rows=order).text.replace(" rows", " entries")
                return _vector_row(name, other, after, "rearranged", text)
    became = alteration(a, b)
    verdict: Verdict = "rearranged" if became.kind == "scaled" else became.kind
    is_reordered = torch.equal(was.sort().values, now.sort().values)
    row = _vector_row(name, other, after, verdict, became.text)
    gain = None
    if now.isfinite().all() and now.all() and was.isfinite().all() and became.kind != "same":
        gain = Operation("factors", 1, now / was)
    return replace(
        row,
        distance=became.distance,
        cosine=became.cosine,
        vectors=(was, now) if is_reordered else (),
        operations=(gain,) if gain and gain.values.isfinite().all() else (),
    )


def _joined_vectors(
    name: str, whole: Tensor, spare: Sequence[str], before: Mapping[str, Tensor]
) -> ComparedLayer | None:
    """Recognise the bias of a fused projection in those of the split ones, or the other way."""
    near = [each for each in spare if depth(each) == depth(name)][:8]  # biases of one layer
    for count in (1, 2, 3):
        for parts in permutations(near, count):
            if sum(before[part].numel() for part in parts) != whole.numel():
                continue
            rows = [before[part].reshape(1, -1) for part in parts]
            if len({row.dtype for row in rows}) > 1:  # which torch cannot join if one has 8 bits
                rows = [row.double() for row in rows]
            became = alteration(torch.cat(rows, 1), whole.reshape(1, -1))
            if became.kind in HARMLESS:
                text = _joined(f"made of {first_few(parts)}", became.text)
                return _vector_row(name, " + ".join(parts), whole, "rearranged", text)
    return None


# --- the whole ------------------------------------------------------------------------------------


def diff(
    before: Source,
    after: Source,
    *,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    renames: Renames = (),
    jobs: int = CORES,
    memory: int | str | None = None,
) -> Diff:
    """Compare two checkpoints, models or state dicts, layer by layer.

    ``renames`` are pairs of texts: what names have in the second, and what instead in the first.
    """
    limit = None if memory is None else bytes_of(memory)
    selection = Selection(tuple(include), tuple(exclude))
    work = DiffCase.of(case(after, before, selection, jobs, limit, renames=renames))
    return work.concluded(row for done in work.examine() for row in work.rows(done))


@dataclass(frozen=True)
class DiffCase:
    """Two opened models and the groups of their layers that are compared together."""

    case: Case
    groups: tuple[Group, ...]

    @classmethod
    def of(cls, case: Case) -> DiffCase:
        """Put what stands at the same depth on both sides into one group."""
        assert case.compared is not None, "a diff has two sides"
        takes = case.selection.takes
        old = [u for u in case.compared.plan.units if takes(u.parts[0].name)]
        new = [u for u in case.inventory.plan.units if takes(u.parts[0].name)]
        names = case.counterparts.names
        homes = {part.name: unit for unit in case.compared.plan.units for part in unit.parts}
        depth_there: dict[str, int | None] = {}  # a matched tensor goes where its counterpart is
        for unit in new:
            for part in unit.parts:
                if part.name in names:
                    depth_there.setdefault(homes[names[part.name]].parts[0].name, part.depth)
        sides: tuple[dict[Any, list[Unit]], ...] = defaultdict(list), defaultdict(list)
        for unit in new:
            sides[1][unit.parts[0].depth].append(unit)
        wanted = {**{u.parts[0].name: u for u in old}, **{n: homes[n] for n in depth_there}}
        for name, unit in wanted.items():
            sides[0][depth_there.get(name, unit.parts[0].depth)].append(unit)
        groups = []
        for key in dict.fromkeys((*sides[1], *sides[0])):
            own = {part.name for unit in sides[1][key] for part in unit.parts}
            there = {part.name for unit in sides[0][key] for part in unit.parts}
            pairs = {a: b for a, b in names.items() if a in own and b in there}
            groups.append(Group(tuple(sides[0][key]), tuple(sides[1][key]), pairs))
        return cls(case, tuple(groups))

    def examine(self) -> Generator[Done[Any]]:
        """Yield each part of the work as it ends."""
        reference = self.case.reference
        assert reference is not None, "a diff has two sides"
        orders: list[_GroupOrder | _VectorOrder] = []
        for group in self.groups:
            sides = [
                side.portion([part.name for unit in units for part in unit.parts])
                for side, units in ((reference, group.before), (self.case.model, group.after))
            ]
            orders.append(_GroupOrder(group, *sides))
        old, new = (_with_vectors(side) for side in (reference, self.case.model))
        orders.append(_VectorOrder(old, new, self.case.counterparts, self.case.selection))
        engine = self.case.engine
        if isinstance(engine, Processes):
            needed = LIBRARY_BYTES + COPIES * max((group.bytes for group in self.groups), default=0)
            slowest = max((len(g.after) + len(g.before) for g in self.groups), default=1)
            limit = max(engine.limit, 1.0) * slowest + 60
            most = engine.memory if self.case.room.limited else max(engine.memory or 0, needed)
            engine = replace(engine, memory=most, limit=limit)
        with closing(engine.run(_done, orders)) as ended:
            yield from ended

    def rows(self, done: Done[Any]) -> list[Told]:
        """Return the rows of a part of the work, or what it failed on."""
        if not done.failure:
            return list(done.result)
        if isinstance(done.item, _VectorOrder):
            return [Skipped("biases and gains", unreadable(done.failure))]
        units = (*done.item.group.before, *done.item.group.after)
        return [Skipped(unit.parts[0].name, unreadable(done.failure)) for unit in units]

    def concluded(self, rows: Iterable[Told]) -> Diff:
        """Return the comparison: what one layer does to another is known only now."""
        every = list(rows)
        layers = [row for row in every if isinstance(row, ComparedLayer)]
        place = {
            part.name: k
            for k, part in enumerate(p for u in self.case.inventory.plan.units for p in u.parts)
        }
        layers.sort(key=lambda row: (place.get(row.name, len(place)), row.name, row.before))
        compared = self.case.compared
        faults = compared.faults if compared else ()
        settings = {k: list(v) if isinstance(v, tuple) else v
                    for k, v in vars(self.case.selection).items()}  # fmt: skip
        return Diff(
            source=str(self.case.model),
            reference=str(self.case.reference),
            layers=tuple(_resolved(layers)),
            notes=(*self.case.counterparts.notes, *self.case.inventory.notes),
            failed=(
                *self.case.inventory.faults,
                *faults,
                *(row for row in every if isinstance(row, Skipped)),
            ),
            settings=settings,
        )


def _done(order: _GroupOrder | _VectorOrder) -> list[Told]:
    return order.layers()


def _with_vectors(side: Location) -> OnDisk | InMemory:
    """Return the side, or of a model in memory its vectors, which can be sent."""
    if isinstance(side, OnDisk):
        return side
    opened = side.opened()
    return InMemory({name: opened.read(path).clone() for name, path in opened.vectors.items()})


def _resolved(layers: Sequence[ComparedLayer]) -> Iterator[ComparedLayer]:
    """Yield the layers with a word on what undoes an order or a scale, or that nothing does."""
    held = {row.digests[0]: row.before for row in layers if row.digests[0]}
    for row in layers:
        if row.verdict == "replaced" and row.digests[1] in held:
            text = f"holds what {held[row.digests[1]]} was"
            yield replace(row, verdict="damaged", text=text)
        elif row.kind == "vector":
            yield _resolved_vector(row, layers)
        else:
            yield _undone(row, layers)


def _undone(row: ComparedLayer, layers: Sequence[ComparedLayer]) -> ComparedLayer:
    """Look for what undoes each operation on a matrix."""
    said = []
    for operation in row.operations:
        others = [x for x in layers if x is not row and x.kind in TOKENS]
        if row.kind in TOKENS and operation.what == "order" and operation.axis == 0 and not others:
            said.append("tokens in another order")
            continue
        partner = next((other for other in layers if _meets(row, operation, other)), None)
        if partner is None:
            text = _joined(row.text, "which no other layer undoes")
            return replace(row, verdict="damaged", text=text)
        said.append(f"undone in {partner.name}")
    return replace(row, text=_joined(row.text, *dict.fromkeys(said)))


def _meets(row: ComparedLayer, operation: Operation, other: ComparedLayer) -> bool:
    """Tell whether the lines of another layer meet those of an operation and undo it."""
    if other is row:
        return False
    for its in other.operations:
        twins = ({"query", "key"}, {*TOKENS})  # whose rows meet: those of tokens in both orders
        compare = {row.kind, other.kind} in twins and its.axis == operation.axis == 0
        meets = compare or its.axis is None or operation.axis is None or its.axis != operation.axis
        if other.kind == "vector":  # a gain is multiplied into the columns that read it
            meets = operation.axis == 1 and operation.what == "factors"
        if meets and its.undoes(operation):
            return True
    return False


def _resolved_vector(row: ComparedLayer, layers: Sequence[ComparedLayer]) -> ComparedLayer:
    """Excuse a vector that follows the rows of a matrix, or a gain that went into one."""
    if row.vectors:
        a, b = row.vectors
        for other in layers:
            for its in other.operations:
                follows = its.what == "order" and len(its.values) == len(a)
                if follows and torch.equal(a[its.values], b):
                    return replace(row, verdict="rearranged", text=f"ordered as {other.name}")
    if row.operations and row.verdict != "same":
        gain = row.operations[0]
        folded = [
            other.name
            for other in layers
            for its in other.operations
            if other.kind != "vector" and its.what == "factors" and its.axis in (1, None)
            if gain.undoes(its)
        ]
        if folded:
            return replace(row, verdict="rearranged", text=f"went into {first_few(folded)}")
    is_scale = row.verdict == "rearranged" and row.text.startswith("multiplied")
    return replace(row, verdict="trained") if is_scale else row
