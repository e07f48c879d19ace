"""Many trials: planned, run where there is room, kept, taken up again, gathered in order.

A study goes on where it was stopped. Its rows are the same to the last bit however it was run: at
once or in pieces, on one process or on many, with few trials at first and more later.

>>> from tempfile import TemporaryDirectory
>>> from kappascope.engines import Here
>>> from kappascope.lab import grid
>>> def trials(streams, size):
...     entries = streams.random().normal(size, size)
...     yield {"component": "frobenius_norm", "error": entries.norm(dim=(-2, -1))}
>>> toy = Experiment(1, "Toy", "4.1", "How large is it?", grid(size=(2, 4)), trials, own=3)
>>> with TemporaryDirectory() as folder, (kept := store.Store(Path(folder))).lock():
...     wanted = plan([toy])
...     failures = [done for done in run(missing(wanted, kept), kept, Here()) if done.failure]
...     results = gather(wanted, kept, failures)
>>> len(results.rows), results.provenance["failed"]
(6, [])
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from kappascope import store
from kappascope.bookmarks import Bookmark
from kappascope.engines import Done, Engine
from kappascope.lab import Batch, Experiment, Setting, Study, page_of, size_of
from kappascope.refusals import Refusal
from kappascope.statistics import Table

if TYPE_CHECKING:
    from kappascope.tasks import Streams

KINDS: dict[str, Any] = {
    "experiment": pa.string(),
    "stream": pa.string(),
    "seed": pa.int64(),
    "component": pa.string(),
    "error": pa.float64(),
    "value": pa.float64(),
    "target": pa.float64(),
    "which": pa.string(),
    "values": pa.list_(pa.float64()),
}
EMPTY = pa.schema(KINDS).empty_table()
TRIAL = ("stream", "seed", "component", "error", "value", "target")  # settings come before these
SPECTRUM = ("stream", "seed", "which", "values")

STACK = 2**19  # entries of a stack: 64 trials up to size 64, two at 512, a few megabytes
TIMED = "seconds"  # the component whose rows are never the same twice
REPRESENTATIVE = 3  # trials of a setting whose spectra are kept


@dataclass(frozen=True)
class Block:
    """Trials of one setting on one stream: all that are wanted, or those run and kept at once."""

    experiment: str
    trials: Callable[..., Iterable[Batch]]
    setting: Setting
    stream: str
    seeds: range
    key: str  # of the own streams
    effort: float
    code: str  # digest of the source that makes the rows
    alone: bool = False  # a network, trained by itself and taken up in the middle

    @cached_property
    def group(self) -> str:
        """A name that trials share if only their seeds differ."""
        what = store.digest([self.setting, self.code, dict(store.environment())])
        return f"{self.experiment}-{self.stream}-{what[:16]}"

    @property
    def name(self) -> str:
        """The name of the file these trials are kept in."""
        return f"{self.group}-{self.seeds.start:06d}-{self.seeds.stop:06d}.unit"

    @property
    def cost(self) -> int:
        """Expected time, about milliseconds; the power fits sizes 32 to 512 within a third."""
        size = 64 if self.alone else size_of(self.setting)
        each = 16 * self.effort * (size / 64) ** 1.5
        return max(1, round(len(self.seeds) * each))

    @property
    def streams(self) -> Streams:
        """The trials' sources of randomness."""
        from kappascope.tasks import Own, Paper

        return Paper(self.seeds) if self.stream == "paper" else Own(self.seeds, self.key)

    def without(self, done: set[int]) -> Iterator[Block]:
        """The trials whose seeds are not done, in blocks of a size that does not depend on them."""
        side = 1 if self.alone else min(64, max(1, STACK // size_of(self.setting) ** 2))
        for first in range(self.seeds.start, self.seeds.stop, side):
            left = [k for k in range(first, min(first + side, self.seeds.stop)) if k not in done]
            if left:
                yield replace(self, seeds=range(left[0], left[-1] + 1))

    def rows(self, bookmark: Bookmark | None = None) -> pa.Table:
        """Run the trials; a network goes on from its bookmark."""
        if self.alone:
            [seed] = self.seeds
            made = self.trials(seed, bookmark or Bookmark(), **self.setting)
            return _named(_listed(made, seed), self)
        return tabulate(self.trials(self.streams, **self.setting), self)

    def __str__(self) -> str:
        setting = ", ".join(f"{name}={value}" for name, value in self.setting.items())
        first, last = self.seeds.start, self.seeds.stop - 1
        trials = f"trial {first}" if first == last else f"trials {first}-{last}"
        return f"{self.experiment} {setting} {self.stream} {trials}"


@dataclass(frozen=True)
class Plan:
    """All trials that are wanted, what has to be said about them, and what they depend on."""

    blocks: tuple[Block, ...]
    notes: tuple[str, ...]
    study: Mapping[str, str | int]


class Kept(NamedTuple):
    """A block's rows, read back."""

    seeds: range
    rows: pa.Table
    seconds: float


def plan(experiments: Iterable[Experiment], asked: int | None = None) -> Plan:
    """Every setting of every experiment on both streams, as many trials as they say or ``asked``.

    >>> from kappascope.lab import Experiment, grid
    >>> toy = Experiment(1, "Toy", "", "", grid(size=(8, 256)), grid, paper=2, own=9)
    >>> [str(block) for block in plan([toy], asked=100).blocks][1:]
    ['e1 size=8 own trials 0-99', 'e1 size=256 paper trials 0-1', 'e1 size=256 own trials 0-8']
    """
    study, blocks, notes = dict(store.environment()), dict[str, Block](), []
    for experiment in experiments:
        study[f"code of {experiment.id}"] = code = _code(experiment.page)
        for setting, stream in product(experiment.grid, ("paper", "own")):
            count = experiment.count(setting, stream, asked)
            if not count:
                continue
            block = _block(experiment, setting, stream, range(count), code)
            if block.group in blocks:
                notes.append(f"{block}: twice in the grid, run once")
            elif stream == "own" and count < (asked or 0):
                notes.append(f"{block}: not {asked}, which would cost too much at this size")
            blocks[block.group] = block
    if not blocks:
        raise Refusal(4, "the grid", "no trial to run", "ask for some trials")
    return Plan(tuple(blocks.values()), tuple(notes), study)


def _code(page: Path) -> str:
    return store.code(page, Path(__file__))


def _block(experiment: Experiment, setting: Setting, stream: str, seeds: range, code: str) -> Block:
    key = f"{experiment.id} {json.dumps(setting, sort_keys=True)}"
    about = experiment.id, experiment.trials, setting, stream, seeds, key
    if isinstance(experiment, Study):
        guess = experiment.seconds
        seconds = guess(setting) if callable(guess) else guess
        return Block(*about, seconds / 0.016, code, alone=True)
    return Block(*about, experiment.effort, code)


def missing(plan: Plan, kept: store.Store) -> list[Block]:
    """The trials of a plan that are not kept yet, those that take longest first."""
    return sorted(_left(plan, _there(plan, kept)), key=lambda block: -block.cost)


def _left(plan: Plan, there: Mapping[str, Sequence[Kept]]) -> Iterator[Block]:
    for block in plan.blocks:
        yield from block.without({seed for kept in there[block.group] for seed in kept.seeds})


def _there(plan: Plan, kept: store.Store) -> dict[str, list[Kept]]:
    """What is kept of each group and whole, by rising seeds."""
    found: dict[str, list[Kept]] = {block.group: [] for block in plan.blocks}
    for name in kept.names():
        if name.rsplit("-", 2)[0] in found and (result := kept.take(name)):
            header, rows = result
            found[header["group"]].append(Kept(range(*header["seeds"]), rows, header["seconds"]))
    return found


def run(todo: Sequence[Block], kept: store.Store, engine: Engine) -> Generator[Done[Block]]:
    """Run the trials and keep them; one that fails leaves the others alone."""
    with closing(engine.run(partial(work, kept), todo)) as ended:
        for done in ended:
            if isinstance(done.error, Refusal):  # nothing more can be kept
                raise done.error
            yield done


def work(kept: store.Store, block: Block) -> None:
    """Run a block of trials and keep its rows."""
    # a process may start, and load its modules, long after the plan was made
    if _code(page_of(block.trials)) != block.code:
        wrong, advice = "changed while trials were running", "give the same command again"
        raise Refusal(4, "the code", wrong, advice)
    start = time.perf_counter()
    bookmark = Bookmark(kept.bookmarks / block.name) if block.alone else None
    rows = block.rows(bookmark)
    header = {
        "group": block.group,
        "setting": dict(block.setting),
        "stream": block.stream,
        "seeds": [block.seeds.start, block.seeds.stop],
        "code": block.code,
        "seconds": time.perf_counter() - start,
    }
    kept.put(block.name, header, rows)
    if bookmark:
        bookmark.forget()


def tabulate(batches: Iterable[Batch], block: Block) -> pa.Table:
    """The rows of a block, each with its experiment, setting, stream and seed."""
    parts = [_part(batch, np.array(block.seeds)) for batch in batches]
    return _named(pa.concat_tables([EMPTY, *parts], promote_options="permissive"), block)


def _listed(batches: Iterable[Batch], seed: int) -> pa.Table:
    """The rows of one trial, each of plain values."""
    rows = [{"seed": seed, **batch} for batch in batches]
    for row in rows:
        if "values" in row:
            row["values"] = np.asarray(row["values"], np.float64).tolist()
    few = [row for row in rows if "values" not in row or seed < REPRESENTATIVE]
    return pa.concat_tables([EMPTY, Table.of(few).rows], promote_options="permissive")


def _named(rows: pa.Table, block: Block) -> pa.Table:
    about = {"experiment": block.experiment, **block.setting, "stream": block.stream}
    columns = {name: _column(value, rows.num_rows) for name, value in about.items()}
    yielded = {name: rows[name] for name in rows.column_names if name not in columns}
    return pa.table({**columns, **yielded})


def _part(batch: Batch, seeds: NDArray[np.int64]) -> pa.Table:
    columns = {"seed": seeds, **batch}
    part = pa.table({name: _column(value, len(seeds)) for name, value in columns.items()})
    return part.filter(pa.array(seeds < REPRESENTATIVE)) if "values" in batch else part


def _column(value: Any, rows: int) -> Any:
    array = np.asarray(value.detach() if hasattr(value, "detach") else value)
    if array.ndim == 0:
        return pa.repeat(pa.scalar(array.item()), rows)
    if len(array) != rows:
        raise ValueError(f"{len(array)} values for {rows} trials: yield one for each, in order")
    if array.ndim == 2:
        return pa.array(list(array), pa.list_(pa.float64()))
    return pa.array(array, pa.float64() if array.dtype.kind == "f" else None)


@dataclass(frozen=True)
class Results:
    """The rows and spectra of a plan, in an order that does not depend on how they were run."""

    rows: Table
    spectra: Table
    provenance: Mapping[str, Any]
    seconds: Mapping[str, float]  # that each group took, apart: they are never the same twice
    times: Table  # rows of seconds, apart for the same reason

    @property
    def everything(self) -> Table:
        """The rows with those of seconds: to be shown, not to be judged."""
        return _joined(self.rows, self.times)


def gather(plan: Plan, kept: store.Store, failures: Sequence[Done[Block]] = ()) -> Results:
    """Everything kept of a plan; what is not there, and why, is in the provenance."""
    there = _there(plan, kept)
    reasons = {done.item.name: done.failure for done in failures}
    failed = [
        {"trials": str(block), "reason": reasons.get(block.name, "cannot be read back")}
        for block in _left(plan, there)
    ]
    parts = [part for block in plan.blocks for part in _wanted(block, there[block.group])]
    table = pa.concat_tables([EMPTY, *parts], promote_options="permissive")
    settings = [name for name in table.column_names if name not in (*TRIAL, *SPECTRUM)]
    drawn = table.filter(pc.is_valid(table["values"]))
    single = table.filter(pc.is_null(table["values"])).select([*settings, *TRIAL])
    timed = pc.fill_null(pc.equal(single["component"], TIMED), False)
    paper = pa.array([b.experiment for b in plan.blocks if b.stream == "paper"], pa.string())
    spare = pc.and_(
        pc.is_in(drawn["experiment"], paper), pc.equal(drawn["stream"], pa.scalar("own"))
    )
    return Results(
        Table.of(single.filter(pc.invert(timed))),
        Table.of(drawn.filter(pc.invert(spare)).select([*settings, *SPECTRUM])),
        {
            **plan.study,
            "settings": store.digest([[block.group, block.seeds.stop] for block in plan.blocks]),
            "trials": sum(len(block.seeds) for block in plan.blocks),
            "failed": failed,
            "notes": list(plan.notes),
        },
        {block.group: sum(kept.seconds for kept in there[block.group]) for block in plan.blocks},
        Table.of(single.filter(timed)),
    )


def _wanted(block: Block, found: Iterable[Kept]) -> Iterator[pa.Table]:
    """The rows of the block's seeds, each seed once, in order."""
    had: set[int] = set()
    for kept in found:
        new = [k for k in kept.seeds if k in block.seeds and k not in had]
        had.update(new)
        ours = Table(kept.rows).where(seed=new).rows
        yield ours.take(np.argsort(ours["seed"].to_numpy(), kind="stable"))


def begun(studies: Iterable[Study], plan: Plan, kept: store.Store) -> Iterator[tuple[Study, Table]]:
    """Every study with the rows that it has so far, on which its next settings depend."""
    results = gather(plan, kept)
    for one in studies:
        yield one, results.rows.where(experiment=one.id)


def publish(results: Results, kept: store.Store, verdicts: Mapping[str, Any]) -> None:
    """Write the tables and verdicts that are derived from what is kept."""
    about = {b"kappascope": json.dumps(results.provenance, sort_keys=True).encode()}
    tables = {"trials": results.rows, "spectra": results.spectra}
    if len(results.times):
        tables["times"] = results.times
    for name, table in tables.items():
        data = store.parquet(table.rows.replace_schema_metadata(about))
        store.write(kept.folder / f"{name}.parquet", data)
    whole = {**verdicts, "provenance": results.provenance}
    store.write(kept.folder / "verdicts.json", store.strict(whole))
    store.write(kept.folder / "timings.json", store.strict(results.seconds))


def published(folder: Path) -> tuple[Table, dict[str, Any]]:
    """The rows and the provenance that :func:`publish` wrote to a folder."""
    rows = store.table(folder / "trials.parquet")
    return Table.of(rows), json.loads((rows.schema.metadata or {}).get(b"kappascope", b"{}"))


def with_times(folder: Path, rows: Table) -> Table:
    """The rows of a folder with those of seconds, if it has any."""
    path = folder / "times.parquet"
    return _joined(rows, Table.of(store.table(path))) if path.is_file() else rows


def _joined(*tables: Table) -> Table:
    parts = [table.rows.replace_schema_metadata(None) for table in tables]
    return Table.of(pa.concat_tables(parts, promote_options="permissive"))


def verify(
    experiments: Iterable[Experiment], kept: store.Store, count: int
) -> Iterator[tuple[Block, bool]]:
    """Run ``count`` kept trials again, each alone: the trial, and whether every bit is the same."""
    plan_of = {e.id: (e, _code(e.page)) for e in experiments}
    names = [name for name in kept.names() if name.split("-")[0] in plan_of]
    compared = 0
    for name in random.sample(names, len(names)):
        if compared == count:
            break
        header, rows = kept.take(name) or ({}, EMPTY)
        experiment, code = plan_of[name.split("-")[0]]
        if header.get("code") == code:  # else it is damaged or old, and no part of the study
            compared += 1
            seed = random.choice(range(*header["seeds"]))
            one = range(seed, seed + 1)
            block = _block(experiment, header["setting"], header["stream"], one, code)
            before, after = Table(rows).where(seed=seed).rows, block.rows()
            # the shortest decimals that give the same bits, and NaN like NaN
            yield block, repr(_lasting(before)) == repr(_lasting(after))


def _lasting(rows: pa.Table) -> list[dict[str, Any]]:
    return [row for row in rows.to_pylist() if row["component"] != TIMED]
