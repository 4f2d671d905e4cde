import os
import shutil
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashpoint.cli.comparison import match
from flashpoint.cli.difference import CHUNK_ELEMENTS, Difference
from flashpoint.view import CheckpointView
from tests.core.cli.roots import (
    flashpoint,
    flip_byte,
    object_of,
    position_of,
    rows,
    saved,
    saved_by_two_ranks,
)

STATE = {
    "weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "bias": np.zeros(4, np.float32),
    "half": np.linspace(0, 1, 8).astype(ml_dtypes.bfloat16),
}


def changed(**arrays):
    return {**STATE, **{name: np.asarray(array) for name, array in arrays.items()}}


def two(root, after, before=STATE, values=({}, {}), **settings):
    return saved(root, before, values[0], step=1, **settings), saved(
        root, after, values[1], step=2, **settings
    )


def by_name(report, kind="tensors"):
    return {one["name"]: one for one in report[kind]}


# ---- what differs -------------------------------------------------------------------------------


def test_equal_versions_are_equal_and_nothing_is_read(job_root, run, run_json, monkeypatch):
    before, after = two(job_root, STATE, values=({"lr": 0.1}, {"lr": 0.1}))
    monkeypatch.setattr(CheckpointView, "part", None)
    code, report = run_json("diff", before, after)
    assert (code, report["equal"], report["bytes_read"]) == (0, True, 0)
    assert (report["tensors"], report["values"], report["counts"]) == ([], [], {"equal": 4})
    assert "equal  4 equal; 0 B read" in run("diff", before, after)[1]


def test_a_changed_tensor_is_measured(job_root, run_json):
    weight = STATE["weight"].copy()
    weight[0, 1] += 3
    weight[2, 3] -= 4
    code, report = run_json("diff", *two(job_root, changed(weight=weight)))
    assert (code, report["equal"], report["counts"]) == (1, False, {"equal": 2, "changed": 1})
    (tensor,) = report["tensors"]
    assert (tensor["name"], tensor["status"], tensor["shape_after"]) == ("weight", "changed", [3, 4])
    assert tensor["difference"] == {
        "elements": 12, "differing": 2, "changed": 2, "max_abs": 4, "norm": 5,
        "relative_norm": pytest.approx(5 / np.linalg.norm(STATE["weight"])),
        "nan_before": 0, "nan_after": 0, "inf_before": 0, "inf_after": 0,
    }  # fmt: skip


def test_tensors_that_came_went_or_took_another_shape_or_dtype(job_root, run_json):
    after = {
        "weight": STATE["weight"].reshape(4, 3),
        "half": STATE["half"].astype(np.float32) + 1,
        "new": np.zeros((), np.int8),
    }
    code, report = run_json("diff", *two(job_root, after))
    found = by_name(report)
    assert code == 1
    assert {name: one["status"] for name, one in found.items()} == {
        "weight": "shape", "half": "dtype", "bias": "removed", "new": "added",
    }  # fmt: skip
    assert (found["new"]["dtype_before"], found["new"]["dtype_after"]) == (None, "int8")
    assert (found["half"]["dtype_before"], found["half"]["dtype_after"]) == ("bfloat16", "float32")
    assert (found["half"]["difference"]["changed"], found["half"]["difference"]["max_abs"]) == (8, 1)
    assert (found["weight"]["shape_before"], found["weight"]["shape_after"]) == ([3, 4], [4, 3])


def test_values_that_differ(job_root, run_json, run):
    values = ({"lr": 0.1, "betas": (0.9, 0.95), "old": 1}, {"lr": 0.2, "betas": (0.9, 0.95), "new": None})
    versions = two(job_root, STATE, values=values)
    code, report = run_json("diff", *versions)
    assert code == 1
    assert report["values"] == [
        {"name": "lr", "status": "changed", "before": 0.1, "after": 0.2},
        {"name": "old", "status": "removed", "before": 1, "after": None},
        {"name": "new", "status": "added", "before": None, "after": None},
    ]
    assert "changed 0.1 0.2 lr" in rows(run("diff", *versions)[1])


def test_what_is_shown_names_the_largest_change_first(job_root):
    after = changed(
        weight=STATE["weight"] * 1.01, half=STATE["half"] * 2, bias=np.full(4, np.nan, np.float32)
    )
    result = flashpoint("diff", *two(job_root, after))
    shown = rows(result.stdout)
    assert (result.returncode, result.stderr) == (1, "")
    assert shown[0].startswith(f"- {job_root}/step-1_ckpt step 1, epoch 0, 1 rank,")
    assert shown[1].startswith(f"+ {job_root}/step-2_ckpt step 2,")
    assert "changed 8 7 1 1 bfloat16 [8] half" in shown
    assert "changed 4 4 0 0 float32 [4] bias NaN 0 -> 4" in shown
    names = [name for row in shown for name in ("half", "weight", "bias") if name in row]
    assert names == ["half", "weight", "bias"]
    assert shown[-1].startswith("different 3 changed;")


def test_only_what_is_asked_for_is_compared_and_tables_are_cut(job_root, run, run_json):
    before = {f"w{i}": np.zeros(2) for i in range(50)}
    versions = two(job_root, {name: array + 1 for name, array in before.items()}, before)
    out = run("diff", *versions)[1]
    assert "... and 20 more: --all shows them, --name selects" in out
    assert "... and 48 more" in run("diff", *versions, "--limit", 2)[1]
    assert [one["name"] for one in run_json("diff", *versions, "--name", "w1?")[1]["tensors"]] == [
        f"w1{i}" for i in range(10)
    ]
    assert len(run_json("diff", *versions, "--all")[1]["tensors"]) == 50
    code, out, err = run("diff", *versions, "--name", "x*")
    assert (code, out) == (2, "")
    assert "neither version has anything that matches 'x*'" in err


# ---- how it finds out ---------------------------------------------------------------------------


def test_only_chunks_that_changed_are_read(job_root, run_json):
    before = {f"w{i}": np.full(1024, i, np.float32) for i in range(8)}
    after = {**before, "w3": before["w3"] + 1}
    code, report = run_json("diff", *two(job_root, after, before, chunk_bytes=4096))
    assert (code, list(by_name(report))) == (1, ["w3"])
    assert report["bytes_read"] == 2 * 2 * 4096  # to find the first difference, and to measure it


def test_what_shares_a_chunk_with_a_change_is_compared_byte_by_byte(job_root, run_json):
    _, report = run_json("diff", *two(job_root, changed(bias=np.ones(4, np.float32))))
    assert (list(by_name(report)), report["counts"]) == (["bias"], {"equal": 2, "changed": 1})
    assert report["bytes_read"] > 0


def test_other_shardings_of_the_same_values_are_equal(job_root, run_json):
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    sharded = saved_by_two_ranks(job_root, whole, step=1)
    twice = np.int32([1, 2, 3])
    code, report = run_json("diff", sharded, saved(job_root, {"sharded": whole, "twice": twice}, {}, step=2))
    assert (code, report["equal"], report["counts"]) == (0, True, {"equal": 2})
    assert (report["before"]["world_size"], report["after"]["world_size"]) == (2, 1)
    other = whole.copy()
    other[3, 5] = 0  # of the second rank
    code, report = run_json("diff", sharded, saved(job_root, {"sharded": other, "twice": twice}, {}, step=3))
    assert (code, by_name(report)["sharded"]["difference"]["changed"]) == (1, 1)


def test_names_of_pytrees_match_those_of_state_dicts(job_root, run_json):
    before = {"model.layers.0.weight": np.zeros(3), "a.b": np.zeros(1), "a/b": np.ones(1)}
    after = {"model/layers/0/weight": np.ones(3), "a.b": np.zeros(1), "a/b": np.ones(1)}
    _, report = run_json("diff", *two(job_root, after, before))
    (tensor,) = report["tensors"]
    assert (tensor["name"], tensor["name_after"]) == ("model.layers.0.weight", "model/layers/0/weight")
    assert tensor["status"] == "changed"


def test_names_that_may_mean_several_are_not_guessed_at():
    matched = match(["a.b.c"], ["a/b/c", "a/b.c"])
    assert (matched.pairs, matched.removed, matched.added) == ([], ["a.b.c"], ["a/b/c", "a/b.c"])


def test_objects_of_another_node_are_told_from_differences(job_root, run_json, run):
    whole = np.arange(8, dtype=np.float32).reshape(4, 2)
    before = saved_by_two_ranks(job_root, whole, step=1)
    same = saved_by_two_ranks(f"{job_root}-same", whole, step=2)
    other = saved_by_two_ranks(f"{job_root}-other", whole + 1, step=3)
    for container in (before, same, other):
        os.unlink(object_of(container, rank=1))
    assert run_json("diff", before, same)[1]["equal"] is True  # the checksums say so
    code, report = run_json("diff", before, other)
    assert (code, report["equal"], by_name(report)["sharded"]["status"]) == (2, None, "not here")
    assert "not known" in run("diff", before, other)[1]


def test_corrupt_bytes_are_never_compared(job_root, run):
    before, after = two(job_root, changed(weight=STATE["weight"] + 1))
    flip_byte(object_of(after), position_of(after, "weight"))
    code, out, err = run("diff", before, after)
    assert (code, out) == (1, "")
    assert "object rank00000-0.safetensors is corrupt" in err


def test_little_memory_is_used_however_large_the_tensors_are(job_root, run_json, monkeypatch):
    monkeypatch.setattr("flashpoint.cli.comparison.SLAB_BYTES", 1 << 20)
    before = {"w": np.zeros((64, 1 << 18), np.float32)}  # 64 MiB
    versions = two(job_root, {"w": before["w"] + 1}, before)
    tracemalloc.start()
    try:
        code, report = run_json("diff", *versions)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (code, by_name(report)["w"]["difference"]["changed"]) == (1, 1 << 24)
    assert peak < 16 << 20


# ---- which versions -----------------------------------------------------------------------------


def test_versions_by_step_and_the_two_newest(job_root, run_json):
    for step in (1, 20, 300):
        saved(job_root, {"w": np.full(2, step, np.int64)}, {}, step=step)
    one, twenty, newest = (f"{job_root}/step-{step}_ckpt" for step in (1, 20, 300))
    for args, paths in (
        ([one, newest], (one, newest)),
        ([one, "20"], (one, twenty)),
        ([job_root], (twenty, newest)),
    ):
        code, report = run_json("diff", *args)
        assert code == 1
        assert (report["before"]["path"], report["after"]["path"]) == paths


def test_a_version_that_was_copied_out_of_memory_is_compared_like_any_other(job_root, run_json, tmp_path):
    container = saved(job_root)
    shutil.copytree(container, tmp_path / "step-100_ckpt")
    assert run_json("diff", container, tmp_path / "step-100_ckpt")[0] == 0


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["{root}/step-1_ckpt"], "{root}/step-1_ckpt is one version: give another one to compare it with"),
        (["{root}"], "{root} has 1 complete version: there is nothing to compare"),
        (["{root}/step-1_ckpt", "7"], "step 7 has no manifest"),
        (["{root}/step-1_ckpt", "{root}/nowhere"], "nowhere"),
    ],
)
def test_what_cannot_be_compared_exits_with_2(job_root, run, args, problem):
    saved(job_root, step=1)
    code, out, err = run("diff", *(arg.format(root=job_root) for arg in args))
    assert (code, out) == (2, "")
    assert problem.format(root=job_root) in err
    assert err.count("\n") == 1


# ---- by how much --------------------------------------------------------------------------------


def difference_of(before, after):
    found = Difference()
    found.add(before, after)
    return found.result()


@pytest.mark.parametrize(
    "dtype",
    [
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "int8",
        "uint64",
        "int4",
        "bool",
    ],
)
def test_a_difference_is_that_of_numpy(dtype):
    rng = np.random.default_rng(0)
    before, after = (rng.uniform(0, 5, (CHUNK_ELEMENTS + 100, 2)).astype(np.dtype(dtype)) for _ in range(2))
    after[::2] = before[::2]
    found = difference_of(before, after)
    a, b = before.astype(np.float64), after.astype(np.float64)
    assert found["elements"] == a.size
    assert found["changed"] == found["differing"] == np.count_nonzero(a != b)
    assert found["max_abs"] == np.abs(a - b).max()
    assert found["norm"] == pytest.approx(np.linalg.norm(a - b))
    assert found["relative_norm"] == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(a))


def test_complex_numbers_have_a_distance_too():
    found = difference_of(np.array([1 + 1j, 2]), np.array([4 + 5j, 2]))
    assert (found["changed"], found["max_abs"], found["norm"]) == (1, 5, 5)


def test_nan_and_inf_are_counted_and_left_out_of_the_sizes():
    before = np.array([np.nan, np.nan, 1, np.inf, np.inf, -np.inf, 3], np.float32)
    after = np.array([np.nan, 2, np.nan, np.inf, -np.inf, 0, 7], np.float32)
    found = difference_of(before, after)
    assert (found["changed"], found["max_abs"], found["norm"], found["relative_norm"]) == (5, 4, 4, 4 / 3)
    assert (found["nan_before"], found["nan_after"], found["inf_before"], found["inf_after"]) == (2, 2, 3, 2)


def test_what_changed_in_its_bytes_alone_is_told_apart():
    before = np.array([0.0, np.nan, 1.0], np.float32)
    after = np.array([-0.0, -np.nan, 1.0], np.float32)
    found = difference_of(before, after)
    assert (found["differing"], found["changed"], found["max_abs"]) == (2, 0, 0)


@pytest.mark.parametrize(
    ("before", "after", "distance"),
    [
        (np.uint64([0, 2**63]), np.uint64([0, 2**63 + 1]), 1),
        (np.int64([-(2**63)]), np.int64([2**63 - 1]), 2**64 - 1),
        (np.int8([-128]), np.int8([127]), 255),
        (np.int64([-5, 3]), np.uint64([2**64 - 1, 3]), 2**64 + 4),
    ],
)
def test_integers_differ_exactly(before, after, distance):
    found = difference_of(before, after)
    assert (found["changed"], found["max_abs"]) == (1, distance)


def test_numbers_that_do_not_exist_are_null():
    assert difference_of(np.zeros(2), np.ones(2))["relative_norm"] is None
    assert difference_of(np.full(2, 1.7e308), np.full(2, -1.7e308))["max_abs"] is None
    assert difference_of(np.zeros((0, 3)), np.zeros((0, 3)))["relative_norm"] == 0


@given(st.lists(st.tuples(*[st.floats(width=32)] * 2), max_size=40), st.integers(1, 5))
def test_a_difference_is_the_same_however_the_tensor_is_cut(pairs, parts):
    before, after = (np.array([pair[side] for pair in pairs], np.float32) for side in (0, 1))
    whole, cut = Difference(), Difference()
    whole.add(before, after)
    for a, b in zip(np.array_split(before, parts), np.array_split(after, parts), strict=True):
        cut.add(a, b)
    for name, value in whole.result().items():
        assert cut.result()[name] == (value if value is None else pytest.approx(value))
    assert whole.differing >= whole.changed
    assert (whole.differing == 0) == (before.tobytes() == after.tobytes())
