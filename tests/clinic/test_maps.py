"""Where each matrix stands: by layer and kind, and no matrix is left out."""

from kappascope.clinic.examination import Examination
from kappascope.clinic.maps import heat_map


def test_every_matrix_has_a_place_and_kinds_stand_as_data_flow() -> None:
    kinds = ("down", "query", "mixer", "embedding")
    rows = [
        Examination(f"{d}.{k}", (2, 2), "", "ok", kind=k, depth=d) for d in (1, 0) for k in kinds
    ]
    grid = heat_map(rows)
    assert grid.columns == ("embedding", "query", "down", "mixer")
    assert [line for line, _ in grid.lines] == [0, 1]
    shown = [row.name for _, cells in grid.lines for cell in cells if cell for row in cell.rows]
    assert sorted(shown) == sorted(row.name for row in rows)
