import os
import pickle
import resource

import ml_dtypes
import numpy as np
import pytest

from flashpoint.cli.statistics import CHUNK_ELEMENTS, Statistics
from flashpoint.layout import Entry
from tests.core.cli.roots import (
    ARRAYS,
    begun,
    crashed,
    flashpoint,
    flip_byte,
    object_of,
    position_of,
    rows,
    saved,
    saved_by_two_ranks,
)


def test_inspect_shows_record_objects_entries_values_and_totals(job_root):
    saved(job_root)
    result = flashpoint("inspect", "step-100_ckpt/", cwd=job_root)  # a relative path, as people type them
    assert (result.returncode, result.stderr) == (0, "")
    shown = rows(result.stdout)
    assert shown[0] == f"{job_root}/step-100_ckpt complete"
    assert shown[1].startswith("step 100, epoch 0, 1 rank, written by flashpoint, 20")
    assert "0 8.0 KiB 1 x 4.0 MiB 2 rank00000-0.safetensors" in shown
    assert "48 B float32 [3, 4] layers.0.weight" in shown
    assert "8 B bfloat16 [2, 2] layers[1].weight" in shown
    assert "betas (0.9, 0.95)" in shown
    assert r"name 'a\nb'" in shown
    assert "800 B 1 100 int64" in shown


def test_inspect_shows_where_shards_lie_in_their_tensor(job_root, run, run_json):
    container = saved_by_two_ranks(job_root, np.zeros((4, 2), np.float32))
    assert "16 B float32 [2, 2] [2:4, 0:2] of [4, 2] rank00001-0 sharded" in rows(
        run("inspect", container)[1]
    )
    _, report = run_json("inspect", container, "sharded")
    places = [(e["object"][:9], e["offsets"], e["shape"], e["global_shape"]) for e in report["entries"]]
    assert places == [("rank00000", [0, 0], [2, 2], [4, 2]), ("rank00001", [2, 0], [2, 2], [4, 2])]


def test_a_glob_selects_names_and_an_exact_name_wins_over_its_meaning_as_a_glob(job_root, run_json):
    container = saved(job_root, {**ARRAYS, "layers1.weight": np.zeros(1)})
    for pattern, names in {
        "layers*": ["layers.0.weight", "layers[1].weight", "layers1.weight"],
        "layers[1].weight": ["layers[1].weight"],
        "layers[12].weight": ["layers1.weight"],
    }.items():
        code, report = run_json("inspect", container, pattern)
        assert code == 0
        assert [entry["name"] for entry in report["entries"]] == names
        assert [value["name"] for value in report["values"]] == []


def test_a_value_asked_for_by_name_is_shown_in_full(job_root, run, run_json):
    container = saved(job_root, values={"schedule": list(range(1000)), "rng": np.arange(600)})
    assert "..." in run("inspect", container)[1]
    assert str(list(range(1000))) in run("inspect", container, "schedule")[1]
    assert "array([ 0, 1, 2" in " ".join(run("inspect", container, "rng")[1].split())
    assert run_json("inspect", container, "schedule")[1]["values"] == [
        {"name": "schedule", "rank": 0, "value": list(range(1000))}
    ]


def test_a_name_that_nothing_matches_is_an_error_with_a_hint(job_root, run):
    code, out, err = run("inspect", saved(job_root), "weight")
    assert (code, out) == (2, "")
    assert err == (
        "flashpoint inspect: step 100 has nothing that matches 'weight'; "
        "2 names with it inside: try '*weight*'\n"
    )


def test_tables_are_cut_at_the_limit_unless_all_rows_are_asked_for(job_root, run, run_json):
    container = saved(job_root, {f"w{i}": np.zeros(1) for i in range(50)})
    out = run("inspect", container)[1]
    assert "... and 20 more: --all shows them, a NAME selects" in out
    assert "w29\n" in out and "w30\n" not in out
    assert "... and 48 more" in run("inspect", container, "--limit", 2)[1]
    assert "w49\n" in run("inspect", container, "--all")[1]
    assert len(run_json("inspect", container)[1]["entries"]) == 50


@pytest.mark.parametrize(
    "dtype",
    ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "int64", "int4"],
)
def test_statistics_of_a_tensor_are_those_of_numpy(job_root, run_json, dtype):
    array = np.random.default_rng(0).uniform(-5, 5, (30, 7)).astype(np.dtype(dtype))
    array[0] = 0
    values = array.astype(np.float64)
    code, report = run_json("inspect", saved(job_root, {"x": array}), "x")
    found = report["statistics"]
    assert code == 0
    assert (found["min"], found["max"]) == (values.min(), values.max())
    assert found["mean"] == pytest.approx(values.mean())
    assert found["std"] == pytest.approx(values.std())
    assert (found["elements"], found["nan"], found["inf"], found["zeros"]) == (210, 0, 0, (values == 0).sum())


def test_statistics_are_the_same_however_the_tensor_is_cut():
    values = 1e6 + np.random.default_rng(0).standard_normal(CHUNK_ELEMENTS + 1000)
    whole, parts = Statistics(), Statistics()
    whole.add(values)
    for part in np.array_split(values, 7):
        parts.add(part)
    assert whole.result() == pytest.approx(parts.result())
    assert whole.result()["std"] == pytest.approx(values.std(), rel=1e-9)


def test_statistics_keep_nan_inf_and_large_integers_apart(job_root, run_json):
    container = saved(
        job_root,
        {
            "bad": np.array([np.nan, np.inf, -np.inf, 0, 2], ml_dtypes.bfloat16),
            "none": np.full(3, np.nan, np.float32),
            "large": np.array([0, 2**64 - 1], np.uint64),
            "huge": np.array([-1.7e308, 1.7e308]),
            "empty": np.zeros((0, 4), np.int32),
        },
    )
    statistics = {
        name: run_json("inspect", container, name)[1]["statistics"]
        for name in ("bad", "none", "large", "huge", "empty")
    }
    histogram = {"edges": list(np.linspace(0, 2, 13)), "counts": [1] + [0] * 10 + [1]}
    assert statistics["bad"] == {
        "elements": 5, "min": 0, "max": 2, "mean": 1, "std": 1, "nan": 1, "inf": 2, "zeros": 1,
        "histogram": histogram,
    }  # fmt: skip
    assert (statistics["none"]["min"], statistics["none"]["mean"], statistics["none"]["nan"]) == (
        None,
        None,
        3,
    )
    assert statistics["large"]["max"] == 2**64 - 1
    assert statistics["huge"]["std"] is statistics["huge"]["histogram"] is None
    assert statistics["none"]["histogram"] is statistics["empty"]["histogram"] is None
    assert statistics["empty"]["elements"] == 0


def test_statistics_of_shards_count_every_element_once(job_root, run_json):
    whole = np.arange(8, dtype=np.float32).reshape(4, 2)
    container = saved_by_two_ranks(job_root, whole)
    assert run_json("inspect", container, "sharded")[1]["statistics"]["mean"] == whole.mean()
    assert run_json("inspect", container, "sharded")[1]["statistics"]["elements"] == 8
    assert run_json("inspect", container, "twice")[1]["statistics"]["elements"] == 3
    os.unlink(object_of(container, rank=1))
    code, report = run_json("inspect", container, "sharded")
    assert code == 0
    assert report["statistics"] == {"note": "a part of it is not on this node: rank00001-0.safetensors"}


def test_corrupt_bytes_behind_statistics_are_told_after_what_is_known(job_root, run):
    container = saved(job_root)
    flip_byte(object_of(container), position_of(container, "ids"))
    code, out, err = run("inspect", container, "ids")
    assert code == 1
    assert "800 B  int64" in out
    assert "object rank00000-0.safetensors is corrupt" in err


class Trap:
    def __reduce__(self):
        return os.mkdir, (Trap.path,)


def test_a_pickled_value_is_never_unpickled(job_root, run, run_json):
    Trap.path = f"{job_root}/sprung"
    data = pickle.dumps(Trap())
    entry = Entry("trap", "uint8", (len(data),), codec="torch")
    saver, pending = begun(job_root, 1, entries=[entry], data=data, with_manifest=True)
    saver.finalize(pending)
    code, out, _ = run("inspect", pending.container, "trap")
    assert code == 0
    assert "pickled (torch)" in out and "it is not unpickled here" in out
    assert run_json("inspect", pending.container, "trap")[1]["entries"][0]["codec"] == "torch"
    assert run("verify", pending.container)[0] == 0
    assert not os.path.exists(Trap.path)


def test_names_can_neither_break_lines_nor_colour_the_terminal(job_root, run, run_json):
    name = "a\nb [red]x[/red] [/] :smile: \x1b[31m \u202e \x85 é 日本"
    container = saved(job_root, {name: np.zeros(2, np.int8)}, {f"{name}.value": name})
    out = run("inspect", container)[1]
    escaped = r"a\nb [red]x[/red] [/] :smile: \x1b[31m \u202e \x85 é 日本"
    assert f"2 B  int8   [2]    {escaped}\n" in out
    assert out.isascii() is False and "\x1b" not in out and "\u202e" not in out
    assert run_json("inspect", container, name)[1]["statistics"]["elements"] == 2


def test_an_unfinished_version_without_manifest_is_shown_by_its_files(job_root, run, run_json):
    container = crashed(job_root, 5)
    code, out, _ = run("inspect", container)
    assert code == 0
    assert f"{container}  dirty\n  unfinished: a crash left its marker (local rank 0 dead)\n" in out
    assert "0 8.0 KiB - 2 rank00000-0.safetensors" in rows(out)
    code, report = run_json("inspect", container)
    assert (code, report["state"], report["manifest_digest"]) == (0, "dirty", None)
    assert report["markers"] == [{"local_rank": 0, "live": False}]


def test_an_unfinished_version_with_a_manifest_is_shown_in_full(job_root, run):
    data = np.arange(10, dtype=np.float32).tobytes()
    container = crashed(job_root, 5, data=data, with_manifest=True)
    code, out, _ = run("inspect", container, "x")
    assert code == 0
    assert "unfinished: a crash left its marker" in out
    assert "mean 4.5" in out


def test_a_version_that_is_being_saved_is_not_called_corrupt(job_root, run):
    _, pending = begun(job_root, 5, with_manifest=True)
    code, out, err = run("inspect", pending.container, "x")
    pending.marker.release()
    assert (code, err) == (0, "")
    assert "saving" in out and "it is being saved" in out


def test_inspect_of_a_corrupt_manifest_is_one_line_and_exit_code_1(job_root):
    container = saved(job_root)
    flip_byte(f"{container}/.metadata", 30)
    result = flashpoint("inspect", container)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith(f"flashpoint inspect: {container}/.metadata: the manifest's checksum")
    assert result.stderr.count("\n") == 1


def test_inspect_of_50000_entries_takes_less_than_a_second_and_a_half(job_root):
    container = saved(job_root, {f"model.layers.{i}.weight": np.zeros(2, np.int8) for i in range(50_000)})

    def processor_seconds():  # what else runs on this machine is no concern of ours
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert "entries  50,000, 97.7 KiB" in flashpoint("inspect", container).stdout
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

    assert any(processor_seconds() < 1.5 for _ in range(3))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int16", "uint64"])
def test_a_histogram_is_that_of_numpy(job_root, run_json, dtype):
    array = np.random.default_rng(0).normal(50, 20, (300, 70)).clip(0, 100).astype(np.dtype(dtype))
    histogram = run_json("inspect", saved(job_root, {"x": array}), "x")[1]["statistics"]["histogram"]
    counts, edges = np.histogram(array.astype(np.float64), bins=12)
    assert histogram["edges"] == pytest.approx(edges)
    assert histogram["counts"] == counts.tolist()
    assert sum(histogram["counts"]) == array.size


def test_few_integers_have_a_bar_each_and_one_value_has_one(job_root, run, run_json):
    container = saved(
        job_root, {"mask": np.array([True] * 3 + [False]), "ids": np.int8([3, 3, 5]), "same": np.full(9, 0.5)}
    )
    found = {
        name: run_json("inspect", container, name)[1]["statistics"]["histogram"]
        for name in ("mask", "ids", "same")
    }
    assert found["mask"] == {"edges": [0, 1, 2], "counts": [1, 3]}
    assert found["ids"] == {"edges": [3, 4, 5, 6], "counts": [2, 0, 1]}
    assert found["same"]["counts"] == [9]
    shown = rows(run("inspect", container, "mask")[1])
    assert f"0 1 {'#' * 14}" in shown and f"1 3 {'#' * 40}" in shown


def test_without_an_agent_nobody_knows_who_else_holds_an_object(job_root, run_json):
    assert [obj["holders"] for obj in run_json("inspect", saved(job_root))[1]["objects"]] == [None]
