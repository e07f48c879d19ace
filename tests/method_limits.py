"""Other limits in the tables of methods, so that small matrices go the way of large ones."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from unittest import mock

from kappascope.matrix import spectra
from kappascope.matrix.spectra import Limit, Method


def limits(columns: Mapping[Method, float]) -> AbstractContextManager[object]:
    """Each of these methods up to so many columns; no line reaches beyond the next one."""

    def changed(table: tuple[Limit, ...]) -> tuple[Limit, ...]:
        lines, most = [], float("inf")
        for limit in reversed(table):
            most = min(most, columns.get(limit.method, limit.columns))
            lines.append(replace(limit, columns=most))
        return tuple(reversed(lines))

    tables = {name: changed(getattr(spectra, name)) for name in ("ALL_VALUES", "EXTREMES")}
    return mock.patch.multiple(spectra, **tables)
