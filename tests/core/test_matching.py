"""Leaves find their entries by name, whichever separator either has, and never by a guess."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashpoint.errors import MismatchError
from flashpoint.layout import Entry
from flashpoint.matching import (
    LeafName,
    Match,
    array_problem,
    axes_of,
    cast_problem,
    does_not_fit,
    match_names,
)

STORED = ["model.layers.0.weight", "model.layers.1.weight", "a/b.c", "step"]


def leaf(path: str) -> LeafName:
    """A leaf whose way through the tree is given with spaces."""
    return LeafName(path.replace(" ", "/"), path.replace(" ", "."))


@pytest.mark.parametrize("path", ["model layers 0 weight", "model layers.0.weight", "model/layers 0/weight"])
def test_dots_and_slashes_are_the_same(path: str) -> None:
    assert match_names([leaf(path)], STORED, None) == Match(["model.layers.0.weight"], [])


@pytest.mark.parametrize("name", ["a b c", "a/b c", "a b.c"])
def test_so_they_are_in_stored_names(name: str) -> None:
    assert match_names([leaf(name)], STORED, None) == Match(["a/b.c"], [])


parts = st.text("ab", min_size=1, max_size=2)
paths = st.lists(st.lists(parts, min_size=1, max_size=3), min_size=1, max_size=6)


@given(paths, st.lists(st.sampled_from("./"), min_size=20, max_size=20))
def test_a_match_has_the_same_parts_and_its_own_name_wins(ways: list[list[str]], signs: list[str]) -> None:
    stored = {"".join(part + sign for part, sign in zip(way, signs, strict=False))[:-1] for way in ways}
    leaves = [leaf(" ".join(way)) for way in ways]
    found = match_names(leaves, stored, None)
    for one, name in zip(leaves, found.names, strict=True):
        alike = [other for other in stored if other.replace("/", ".") == one.dotted]
        if one.dotted in stored:
            assert name == one.dotted
        elif one.shown in stored:
            assert name == one.shown
        else:
            assert name == (alike[0] if len(alike) == 1 else None)


@pytest.mark.parametrize("key", ["w/x", "w.x"])
def test_a_mapping_renames_what_it_names(key: str) -> None:
    found = match_names([leaf("w x"), leaf("step")], STORED, {key: "model/layers/1.weight"})
    assert found == Match(["model.layers.1.weight", "step"], [])


def test_a_function_renames_all() -> None:
    names = match_names(
        [leaf("layers 0"), leaf("layers 1")], STORED, lambda name: f"model/{name}/weight"
    ).names
    assert names == ["model.layers.0.weight", "model.layers.1.weight"]


def test_problems_say_what_was_looked_for() -> None:
    rules = {"x": "model.layers.0.wieght", "not/there": "step"}
    found = match_names([leaf("x"), leaf("weight"), leaf("other")], STORED, rules)
    assert found.names == [None, None, None]
    assert found.problems == [
        "'not/there': rename= names it, but the state has no such leaf",
        "'x' (renamed 'model.layers.0.wieght'): not in the checkpoint; near: 'model.layers.0.weight', "
        "'model.layers.1.weight'",
        "'weight': not in the checkpoint; near: 'model.layers.0.weight', 'model.layers.1.weight'",
        "'other': not in the checkpoint",
    ]


def test_ten_problems_are_shown_and_all_are_counted() -> None:
    found = match_names([leaf(f"x{n}") for n in range(25)], STORED, None)
    error = does_not_fit("step 7", found.problems)
    assert isinstance(error, MismatchError)
    assert str(error).startswith("the state does not fit step 7 in 25 places:\n  'x0': not in the checkpoint")
    assert str(error).count("\n  'x") == 10
    assert "\n  and 15 more\n" in str(error)


def test_axes_come_from_a_mapping_or_a_function() -> None:
    leaves = [leaf("a w"), leaf("b")]
    assert axes_of(leaves, None) == ([(), ()], [])
    assert axes_of(leaves, {"a.w": [1, 0]}) == ([(1, 0), ()], [])
    assert axes_of(leaves, lambda name: (2, 0, 1) if name == "b" else None) == ([(), (2, 0, 1)], [])
    assert axes_of(leaves, {"c": (1, 0)})[1] == ["'c': transpose= names it, but the state has no such leaf"]


def test_an_array_fits_as_it_is_or_turned() -> None:
    entry = Entry("w", "float32", (1, 3, 4), (1, 0, 0), (2, 3, 4))
    assert array_problem("w", entry, (2, 3, 4), "float32") == ""
    assert array_problem("w", entry, (4, 2, 3), "float32", axes=(2, 0, 1)) == ""
    wrong = array_problem("w", entry, (2, 3, 4), "float32", axes=(2, 0, 1))
    assert wrong == "'w': shape [2, 3, 4] (transposed [4, 2, 3]) there, [2, 3, 4] here"
    for axes in ((0, 1), (0, 1, 1), (0, 1, 3), (-1, 0, 1)):
        assert "does not order the 3 axes" in array_problem("w", entry, (2, 3, 4), "float32", axes=axes)


KINDS = [
    ["bool"],
    ["int8", "uint64", "int4"],
    ["float8_e4m3fn", "bfloat16", "float64"],
    ["complex64", "complex128"],
]


@pytest.mark.parametrize("here", range(4))
@pytest.mark.parametrize("there", range(4))
def test_casts_lose_no_kind(there: int, here: int) -> None:
    for one in KINDS[there]:
        for other in KINDS[here]:
            assert (cast_problem("w", one, other) == "") == (one == other or here >= there)
            assert (cast_problem("w", one, other, cast=False) == "") == (one == other)
    assert cast_problem("w", "float4_e2m1fn_x2", "float32") != ""
