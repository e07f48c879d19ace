"""A diff tells of every layer what became of it, and calls no damage harmless."""

from pathlib import Path

import pytest
import torch

from checkpoint_pairs import DAMAGES, TRANSFORMATIONS, Draw, exact, language_model, path
from kappascope.clinic.diff import Diff, diff


@pytest.mark.parametrize("make", TRANSFORMATIONS)
@pytest.mark.parametrize("seed", [0, 1])
def test_every_transformation_is_recognised(make, seed: int) -> None:
    pair = make(Draw(seed))
    for layer in diff(pair.before, pair.after).layers:
        assert layer.verdict == pair.verdicts.get(layer.name, pair.others), (pair.kind, layer)


@pytest.mark.parametrize("make", DAMAGES)
@pytest.mark.parametrize("seed", [0, 1])
def test_no_damage_is_called_harmless(make, seed: int) -> None:
    pair = make(Draw(seed))
    found = {layer.name: layer for layer in diff(pair.before, pair.after).layers}
    assert {name: found[name].verdict for name in pair.verdicts} == dict(pair.verdicts)
    others = [layer for name, layer in found.items() if name not in pair.verdicts]
    assert {layer.verdict for layer in others} == {pair.others}


def test_files_are_compared_as_models_are(tmp_path: Path) -> None:
    before = exact(Draw(3))
    after = {name: it.bfloat16() for name, it in before.items()}
    after[path(1, "up_proj")] = after[path(1, "up_proj")].clone()
    after[path(1, "up_proj")][3, 4] = torch.nan
    torch.save(before, tmp_path / "before.pt")
    torch.save(after, tmp_path / "after.pt")
    found = diff(tmp_path / "before.pt", tmp_path / "after.pt", jobs=1)
    assert found.counts == diff(before, after).counts
    assert (found.ranked[0].name, found.ranked[0].verdict) == (path(1, "up_proj"), "damaged")
    mixed = diff(before, tmp_path / "after.pt", jobs=1)
    assert mixed.counts == found.counts


EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
def test_floats_of_eight_bits_are_compared_as_any_others(dtype: torch.dtype) -> None:
    before = exact(Draw(4))
    after = {name: it.to(dtype) for name, it in before.items()}
    for one, other in ((before, after), (after, before)):
        found = diff(one, other)
        assert not found.failed and {layer.verdict for layer in found.layers} == {"rounding"}
    found = diff(after, {name: it.clone() for name, it in after.items()})
    assert not found.failed and {layer.verdict for layer in found.layers} == {"same"}


@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
def test_what_was_done_to_floats_of_eight_bits_is_recognised(dtype: torch.dtype) -> None:
    draw = Draw(5)
    up, down, bias = draw.normal(48, 32), draw.normal(32, 48), draw.normal(48)
    order = torch.randperm(48, generator=torch.Generator().manual_seed(5))
    names = ("h.0.mlp.fc1.weight", "h.0.mlp.fc2.weight", "h.0.mlp.fc1.bias")
    old, new = (
        {name: it.to(dtype) for name, it in zip(names, made, strict=True)}
        for made in ((up, down, bias), (up[order], down[:, order], bias[order]))
    )
    reordered = diff(old, new)
    assert not reordered.failed
    assert {layer.verdict for layer in reordered.layers} == {"rearranged"}
    new = {**old, names[0]: (up + up.std() * draw.normal(48, 32) / 4).to(dtype)}
    new[names[1]] = old[names[1]].float().index_fill(0, torch.tensor([3]), torch.nan).to(dtype)
    verdicts = {layer.name: layer.verdict for layer in diff(old, new).layers}
    assert verdicts == dict(zip(names, ("trained", "damaged", "same"), strict=True))


@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
def test_biases_of_mixed_types_are_found_in_a_fused_one(dtype: torch.dtype) -> None:
    draw = Draw(6)
    parts = [draw.normal(16).to(dtype), draw.normal(16), draw.normal(16).bfloat16()]
    split = {f"h.0.attn.{x}_proj.bias": it for x, it in zip("qkv", parts, strict=True)}
    fused = {"h.0.attn.c_attn.bias": torch.cat([it.float() for it in parts])}
    weight = {"h.0.mlp.fc1.weight": draw.normal(16, 16)}
    found = {layer.name: layer for layer in diff({**split, **weight}, {**fused, **weight}).layers}
    assert found["h.0.attn.c_attn.bias"].verdict == "rearranged"


def test_a_head_that_is_lost_is_missing_and_a_new_one_is_added() -> None:
    before = language_model(Draw(1))
    after = {name: it for name, it in before.items() if name != "lm_head.weight"}
    assert diff(before, after).ranked[0].verdict == "missing"
    assert diff(after, before).ranked[0].verdict == "added"


def test_what_moved_most_stands_first() -> None:
    before = exact(Draw(2))
    after = dict(before)
    for size, name in ((0.01, "q_proj"), (0.1, "k_proj"), (0.05, "v_proj")):
        it = before[path(0, name)]
        after[path(0, name)] = it + size * it.std() * Draw(5).normal(*it.shape)
    names = [layer.name for layer in diff(before, after).ranked[:3]]
    assert names == [path(0, name) for name in ("k_proj", "v_proj", "q_proj")]


def test_the_document_counts_every_verdict() -> None:
    before = exact(Draw(2))
    document = diff(before, before).document()
    assert document["schema"] == "kappascope.diff/1"
    assert document["summary"]["by_verdict"]["same"] == len(document["layers"]) == len(before)


def test_an_empty_diff_says_so() -> None:
    assert Diff("b.pt", "a.pt").verdict == "Nothing could be compared."


def test_tokens_in_another_order_are_so_in_the_table_and_in_the_head() -> None:
    before = exact(Draw(4))
    order = Draw(1).order(len(before["lm_head.weight"]))
    head = {"lm_head.weight": before["lm_head.weight"][order]}
    assert diff(before, before | head).ranked[0].verdict == "damaged"
    table = {"model.embed_tokens.weight": before["model.embed_tokens.weight"][order]}
    assert diff(before, before | head | table).ranked[0].verdict == "rearranged"
