import contextlib
import json
import os
import pickle
import pty
import resource
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import ml_dtypes
import msgspec
import numpy as np
import pytest

from flashpoint import cli, manifest
from flashpoint.checksums import chunk_digests
from flashpoint.cli import agent, inspect, ls, simulate, verify, versions
from flashpoint.cli.output import Page
from flashpoint.cli.statistics import CHUNK_ELEMENTS, Statistics
from flashpoint.config import FlashpointConfig
from flashpoint.coordinator import SingleProcessCoordinator
from flashpoint.layout import Entry
from flashpoint.objects import CheckpointObjectManager
from flashpoint.saver import MLFlashpointCheckpointSaver

REPOSITORY = Path(__file__).resolve().parents[2]
ARRAYS = {
    "layers.0.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "layers[1].weight": np.ones((2, 2), ml_dtypes.bfloat16),
    "ids": np.arange(100, dtype=np.int64),
}
TEN_FLOATS = (Entry("x", "float32", (10,)),)
VALUES = {"step": 7, "betas": (0.9, 0.95), "name": "a\nb"}


# ---- making job roots ---------------------------------------------------------------------------


def saver_of(root, **settings):
    return MLFlashpointCheckpointSaver(
        CheckpointObjectManager(root, config=FlashpointConfig(keep=0, **settings))
    )


def saved(root, arrays=ARRAYS, values=VALUES, step=100, **settings):
    """Save one version and return its folder."""
    saver = saver_of(root, **settings)
    saver.save(step, arrays, values)
    saver.objects.close()
    return f"{root}/step-{step}_ckpt"


def begun(root, step, *, entries=TEN_FLOATS, data=b"", with_manifest=False):
    """Begin a save and stop before its end; returns (saver, pending), whose marker is live."""
    saver = saver_of(root)
    pending = saver.begin(step)
    saver.initialize_checkpoint(pending)
    layout = saver.plan(entries)

    def fill(buffer):
        buffer.data[layout.begins[0] : layout.begins[0] + len(data)] = memoryview(data)

    pending.staged.append(saver.stage(layout, fill))
    saver.write(pending)
    if with_manifest:
        saver.write_metadata(pending)
    return saver, pending


def crashed(root, step, **how):
    saver, pending = begun(root, step, **how)
    for part in pending.staged:
        part.release(saver.objects.pool)
    pending.marker.release()  # as the kernel does for the dead
    return pending.container.path


class ThreadCoordinator(SingleProcessCoordinator):
    """A rank in a thread of this process."""

    def __init__(self, rank, shared):
        self.rank, self.local_rank, self.world_size = rank, rank, 2
        self._values, self._changed = shared._values, shared._changed


def saved_by_two_ranks(root, whole, step=100):
    """One tensor in two shards and one that both ranks store whole, saved by two ranks of this node."""
    shared, half = SingleProcessCoordinator(), len(whole) // 2

    def save(rank):
        objects = CheckpointObjectManager(root, rank=rank)
        saver = MLFlashpointCheckpointSaver(objects, ThreadCoordinator(rank, shared))
        pending = saver.begin(step)
        saver.initialize_checkpoint(pending)
        shard = whole[rank * half : (rank + 1) * half]
        origin = (rank * half, *[0] * (whole.ndim - 1))
        entries = [
            Entry("sharded", whole.dtype.name, shard.shape, origin, whole.shape),
            Entry("twice", "int32", (3,)),
        ]
        layout = saver.plan(entries)

        def fill(buffer):
            for array, begin, end in zip(
                [shard, np.int32([1, 2, 3])], layout.begins, layout.ends, strict=True
            ):
                buffer.data[begin:end] = np.frombuffer(array.tobytes(), np.uint8)

        pending.staged.append(saver.stage(layout, fill))
        saver.write(pending)
        saver.write_metadata(pending)
        saver.finalize(pending)

    threads = [threading.Thread(target=save, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return f"{root}/step-{step}_ckpt"


def object_of(container, rank=0):
    return Path(container, f"rank{rank:05d}-0.safetensors")


def flip_byte(path, position):
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 0xFF]))


def position_of(container, name):
    data = Path(container, ".metadata").read_bytes()
    decoded = manifest.decode(data)
    record, i = decoded.by_name[name][0]
    return decoded.layout(record).begins[i]


# ---- running commands ---------------------------------------------------------------------------


@pytest.fixture
def run(capsys):
    """Run a command in this process; returns (exit code, stdout, stderr)."""

    def run(*args):
        try:
            code = cli.main([str(arg) for arg in args])
        except SystemExit as exit:
            code = exit.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def run_json(run):
    def run_json(*args):
        code, out, _ = run(*args, "--json")
        return code, json.loads(out)

    return run_json


def flashpoint(*args, **options):
    """Run a command as a user does, in a process of its own."""
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), **options.pop("env", {})}
    command = [sys.executable, "-m", "flashpoint", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, **options)


def rows(text):
    return [" ".join(line.split()) for line in text.splitlines()]


# ---- ls -----------------------------------------------------------------------------------------


def test_ls_tells_complete_saving_and_dirty_versions_apart_newest_first(job_root):
    saved(job_root, step=9)
    saved(job_root, step=10)
    crashed(job_root, 11)
    _, pending = begun(job_root, 12)
    result = flashpoint("ls", job_root)
    pending.marker.release()
    assert (result.returncode, result.stderr) == (0, "")
    listed = rows(result.stdout)
    assert listed[0] == job_root
    assert [row.split()[0] for row in listed[2:6]] == ["12", "11", "10", "9"]
    assert "12 - saving 8.0 KiB 1 -" in listed[2] and "it is being saved" in listed[2]
    assert "11 - dirty" in listed[3] and "a crash left its marker" in listed[3]
    assert "10 0 complete 8.0 KiB 1 1" in listed[4]
    assert any(row.startswith("pool: 4 files, 32.0 KiB; free: 0") for row in listed)
    assert any(row.startswith("tmpfs /dev/shm:") for row in listed)


def test_ls_finds_the_job_roots_one_level_below_a_folder(job_root, run_json):
    parent = Path(job_root).parent
    saved(job_root)
    saved(str(parent / "other"))
    (parent / "no job root").mkdir()
    code, found = run_json("ls", parent)
    assert code == 0
    assert [root["path"] for root in found["job_roots"]] == [job_root, f"{parent}/other"]


def test_ls_looks_into_dev_shm_where_no_folder_is_given(monkeypatch, run_json):
    seen = []
    monkeypatch.setattr(ls, "_job_roots", lambda place: seen.append(place) or [])
    assert run_json("ls") == (0, {"job_roots": []})
    assert seen == ["/dev/shm"]


def test_ls_of_an_empty_folder_finds_nothing_and_is_fine(job_root, run):
    code, out, err = run("ls", job_root)
    assert (code, err) == (0, "")
    assert out == f"no checkpoints in {job_root}, nor in the folders directly below\n"


def test_ls_shows_a_garbled_manifest_as_corrupt_and_exits_with_1(job_root, run_json):
    saved(job_root, step=1)
    Path(saved(job_root, step=2), ".metadata").write_bytes(b"{}\n")
    code, found = run_json("ls", job_root)
    assert code == 1
    states = [(version["step"], version["state"]) for version in found["job_roots"][0]["versions"]]
    assert states == [(2, "corrupt"), (1, "complete")]


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path), os.mkdir])
def test_ls_neither_waits_for_nor_follows_what_stands_in_a_manifests_place(
    job_root, run_json, monkeypatch, make
):
    container = saved(job_root)
    os.unlink(f"{container}/.metadata")
    make(f"{container}/.metadata")
    read = []
    monkeypatch.setattr(
        versions, "decode_record", lambda head: read.append(head) or manifest.decode_record(head)
    )
    code, found = run_json("ls", job_root)
    assert code == 1
    assert found["job_roots"][0]["versions"][0]["problem"]
    assert not any(read)


def test_ls_counts_free_pool_files_and_ranks_whose_objects_are_elsewhere(job_root, run, run_json):
    container = saved_by_two_ranks(job_root, np.zeros((4, 2), np.float32))
    os.unlink(object_of(container, rank=1))
    _, found = run_json("ls", job_root)
    version, pool = found["job_roots"][0]["versions"][0], found["job_roots"][0]["pool"]
    assert (version["objects_here"], version["objects"], version["world_size"]) == (1, 2, 2)
    assert (pool["files"], pool["free_files"]) == (2, 1)
    assert pool["bytes"] == 2 * pool["free_bytes"] == version["bytes"] == 2 * version["bytes_here"]
    assert "1 of 2" in run("ls", job_root)[1]


def test_ls_orders_by_epoch_before_step(job_root, run_json):
    saved(job_root, step=50)
    saver = saver_of(job_root)
    saver.epoch = 1
    saver.save(20, ARRAYS)
    _, found = run_json("ls", job_root)
    assert [(v["epoch"], v["step"]) for v in found["job_roots"][0]["versions"]] == [(1, 20), (0, 50)]


def test_looking_changes_nothing(job_root, run):
    saved(job_root, step=1)
    crashed(job_root, 2)
    Path(job_root, "step-3_ckpt").write_text("a file in a container's place")

    def everything():
        return {str(path): path.stat().st_mtime_ns for path in Path(job_root).rglob("*")}

    before = everything()
    assert run("ls", job_root)[0] == 0
    assert run("inspect", f"{job_root}/step-2_ckpt")[0] == 0
    assert run("verify", job_root)[0] == 0
    assert run("inspect", f"{job_root}/step-3_ckpt")[0] == 2
    assert everything() == before


# ---- inspect ------------------------------------------------------------------------------------


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
    assert statistics["bad"] == {
        "elements": 5, "min": 0, "max": 2, "mean": 1, "std": 1, "nan": 1, "inf": 2, "zeros": 1,
    }  # fmt: skip
    assert (statistics["none"]["min"], statistics["none"]["mean"], statistics["none"]["nan"]) == (
        None,
        None,
        3,
    )
    assert statistics["large"]["max"] == 2**64 - 1
    assert statistics["huge"]["std"] is None
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


# ---- verify -------------------------------------------------------------------------------------


def test_verify_of_a_good_version_exits_with_0(job_root):
    result = flashpoint("verify", saved(job_root))
    assert (result.returncode, result.stderr) == (0, "")
    assert "ok 8.0 KiB 1 rank00000-0.safetensors" in rows(result.stdout)
    assert "1 version ok; 8.0 KiB in" in result.stdout and "GiB/s" in result.stdout


def test_verify_names_the_corrupt_chunks_and_the_entries_in_them(job_root, run_json):
    arrays = {f"w{i}": np.full(1024, i, np.float32) for i in range(6)}
    container = saved(job_root, arrays, chunk_bytes=4096)
    flip_byte(object_of(container), position_of(container, "w3"))
    result = flashpoint("verify", container)
    assert result.returncode == 1
    assert "1 of 7 chunks do not match their checksums, in 'w3'" in result.stdout
    code, report = run_json("verify", container)
    found = report["versions"][0]["objects"][0]
    assert (code, report["status"], found["status"]) == (1, "corrupt", "corrupt")
    assert (found["broken_chunks"], found["broken_entries"]) == ([4], ["w3"])


def test_verify_of_a_job_root_looks_at_every_complete_version(job_root, run, run_json):
    saved(job_root, step=1)
    flip_byte(object_of(saved(job_root, step=2)), 5000)
    crashed(job_root, 3)
    code, report = run_json("verify", job_root)
    assert code == 1
    found = [(version["step"], version["status"]) for version in report["versions"]]
    assert found == [(3, "unfinished"), (2, "corrupt"), (1, "ok")]
    shutil.rmtree(f"{job_root}/step-2_ckpt")
    assert run("verify", job_root)[0] == 0  # a job that is saving is no reason to fail
    shutil.rmtree(f"{job_root}/step-1_ckpt")
    code, _, err = run("verify", job_root)
    assert code == 2
    assert err == f"flashpoint verify: {job_root} has no complete version to verify\n"


def test_verify_of_an_unfinished_version_exits_with_2(job_root, run):
    code, out, _ = run("verify", crashed(job_root, 3))
    assert code == 2
    assert "unfinished: a crash left its marker" in out
    assert run("verify", saved(job_root, step=4), f"{job_root}/step-3_ckpt")[0] == 2


def test_verify_finds_missing_truncated_and_emptied_objects(job_root, run):
    container = saved(job_root, step=1)
    os.unlink(object_of(container))
    code, out, _ = run("verify", container)
    assert code == 1
    assert "missing 8.0 KiB 1 rank00000-0.safetensors it is not there" in rows(out)
    for nbytes in (0, 4096):
        container = saved(job_root, step=2 + nbytes)
        os.truncate(object_of(container), nbytes)
        code, out, _ = run("verify", container)
        assert code == 1
        assert f"has {nbytes} bytes, its manifest says 8192" in out


def test_objects_of_other_nodes_are_no_error_if_told_so(job_root, run, run_json):
    container = saved_by_two_ranks(job_root, np.zeros((4, 2), np.float32))
    os.unlink(object_of(container, rank=1))
    code, out, _ = run("verify", container)
    assert code == 1
    assert "if other nodes hold the objects of ranks 1, add --this-node" in out
    code, report = run_json("verify", container, "--this-node")
    assert code == 0
    assert [obj["status"] for obj in report["versions"][0]["objects"]] == ["ok", "elsewhere"]
    os.unlink(object_of(container, rank=0))
    assert run("verify", container, "--this-node")[0] == 1  # nothing at all is here


def test_verify_finds_a_manifest_whose_checksum_does_not_match(job_root, run):
    container = saved(job_root)
    flip_byte(f"{container}/.metadata", 100)
    code, out, err = run("verify", container)
    assert (code, err) == (1, "")
    assert "the manifest's checksum does not match its contents" in out


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (b'"ids":', b'"idz":', "its safetensors header and the manifest's layout disagree about 'idz'"),
        (b'"I64"', b'"F64"', "its safetensors header and the manifest's layout disagree about 'ids'"),
        (b'"I64"', b'"Q64"', "not a safetensors header: 'ids' does not fill its byte range"),
        (b'{"__meta', b'("__meta', "not a safetensors header"),
    ],
)
def test_verify_compares_each_objects_header_with_the_manifest(job_root, run, old, new, problem):
    container = saved(job_root)
    path = object_of(container)
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))
    # As if a faulty writer had sealed it so: its checksums are those of the wrong header.
    decoded = manifest.decode(Path(container, ".metadata").read_bytes())
    record = decoded.objects[0]
    chunks = chunk_digests(np.fromfile(path, np.uint8), record.chunk_bytes)
    record = msgspec.structs.replace(record, chunks=chunks)
    head = msgspec.structs.replace(decoded.record, objects=(record,))
    Path(container, ".metadata").write_bytes(manifest.encode(head, decoded.sections))
    code, out, _ = run("verify", container)
    assert code == 1
    assert problem in out
    assert "do not match their checksums" not in out


def test_a_version_given_up_while_it_is_verified_is_gone_and_not_corrupt(job_root, run, monkeypatch):
    container = saved(job_root, step=1)
    saved(job_root, step=2)

    @contextlib.contextmanager
    def give_up(name, nbytes):
        shutil.rmtree(container, ignore_errors=True)
        yield lambda done: None

    monkeypatch.setattr(verify, "_progress", give_up)
    code, out, _ = run("verify", container)
    assert code == 2
    assert out.startswith(f"gone  {container}\n")
    assert run("verify", job_root)[0] == 0


def test_verify_folds_the_good_objects_of_a_large_job(job_root, run, monkeypatch):
    monkeypatch.setattr(verify, "_ROWS_MAX", 1)
    container = saved_by_two_ranks(job_root, np.zeros((4, 2), np.float32))
    flip_byte(object_of(container, rank=1), 5000)
    code, out, _ = run("verify", container)
    assert code == 1
    assert "1 more object: nothing wrong (--all lists them)" in out
    assert "rank00000-0" not in out and "rank00001-0" in out
    assert "rank00000-0" in run("verify", container, "--all")[1]


def test_progress_goes_to_a_terminal_on_stderr_and_never_to_stdout(job_root):
    container = saved(job_root)
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "flashpoint", "verify", container, "--json"]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TERM": "xterm"}
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=follower, env=env, timeout=60)
    os.close(follower)
    drawn = b""
    with contextlib.suppress(OSError):  # EIO: nobody holds the other end any more
        while data := os.read(leader, 4096):
            drawn += data
    os.close(leader)
    assert json.loads(result.stdout)["status"] == "ok"
    assert b"step-100_ckpt" in drawn


# ---- all commands -------------------------------------------------------------------------------

NO_CHECKPOINT = " is no checkpoint: a container is a folder named step-<n>_ckpt"


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["ls", "{root}/nowhere"], "{root}/nowhere: No such file or directory"),
        (["ls", "{root}/file"], "{root}/file: Not a directory"),
        (["ls", "{root}/step-9_ckpt"], "{root}/step-9_ckpt is one version: `flashpoint inspect` shows it"),
        (["inspect", "{root}/nowhere"], "{root}/nowhere: there is no such folder"),
        (["inspect", "{root}/nowhere/step-1_ckpt"], "{root}/nowhere: No such file or directory"),
        (["inspect", "{root}/step-7_ckpt"], "{root}/step-7_ckpt: there is no such version"),
        (["inspect", "{root}/file"], "{root}/file" + NO_CHECKPOINT),
        (
            ["inspect", "{root}"],
            "{root} is a job root, not a container; its newest version is {root}/step-9_ckpt",
        ),
        (["inspect", "{root}/step-9_ckpt", "--rank", "1"], "step 9 has 1 rank: there is no rank 1"),
        (["verify", "{root}/nowhere"], "{root}/nowhere: there is no such folder"),
        (["verify", "/"], "/" + NO_CHECKPOINT),
        (["verify", "{root}/file"], "{root}/file" + NO_CHECKPOINT),
    ],
)
def test_what_is_not_there_is_one_line_on_stderr_and_exit_code_2(job_root, run, args, problem):
    saved(job_root, step=9)
    Path(job_root, "file").touch()
    code, out, err = run(*(arg.format(root=job_root) for arg in args))
    assert (code, out) == (2, "")
    assert err == f"flashpoint {args[0]}: {problem.format(root=job_root)}\n"


@pytest.mark.parametrize("args", [[], ["no-command"], ["inspect"], ["verify"], ["ls", "--no-option"]])
def test_wrong_usage_exits_with_2(run, args):
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert err.startswith("usage: flashpoint")


def test_options_may_stand_anywhere(job_root, run):
    container = saved(job_root)
    for args in (["--json", container, "ids"], [container, "--json", "ids"], [container, "ids", "--json"]):
        assert json.loads(run("inspect", *args)[1])["statistics"]["max"] == 99


def test_debug_shows_the_traceback_of_an_error(job_root, run):
    assert "Traceback" not in run("ls", f"{job_root}/nowhere")[2]
    code, _, err = run("ls", f"{job_root}/nowhere", "--debug")
    assert code == 2
    assert err.startswith("Traceback") and "FileNotFoundError" in err


def test_a_bug_is_never_taken_for_a_corrupt_checkpoint(run, monkeypatch):
    monkeypatch.setattr(ls, "run", lambda args: 1 // 0)
    code, _, err = run("ls")
    assert code == 70
    assert "ZeroDivisionError" in err


def test_a_reader_that_goes_away_is_no_error(job_root):
    container = saved(job_root, {f"w{i}": np.zeros(1) for i in range(5000)})
    for option in ("--all", "--json"):
        command = [sys.executable, "-m", "flashpoint", "inspect", container, option]
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
        process.stderr.close()
        assert process.wait(timeout=60) == 0


@pytest.mark.parametrize("module", cli.COMMANDS, ids=lambda module: module.NAME)
def test_every_key_of_the_json_is_documented_in_the_help(job_root, run, run_json, module):
    container = saved(job_root)
    crashed(job_root, 101)
    args = {
        ls: [job_root],
        inspect: [container, "ids"],
        verify: [job_root],
        agent: [job_root, "--stop"],
        simulate: ["--seeds", "2", "--nodes", "2", "--jobs", "1"],
    }[module]
    code, report = run_json(module.NAME, *args)
    assert code == 0
    help_text = run(module.NAME, "--help")[1].replace("[]", " ").replace(",", " ").replace("}", " ").split()

    def keys(value):
        if isinstance(value, dict):
            for key, item in value.items():
                yield key
                yield from keys(item)
        elif isinstance(value, list):
            for item in value:
                yield from keys(item)

    assert set(keys(report)) <= {word.strip("{") for word in help_text}


def test_each_command_says_its_exit_codes(run):
    for args in ([], *([module.NAME] for module in cli.COMMANDS)):
        code, out, _ = run(*args, "--help")
        assert code == 0
        assert "exit codes:" in out


def test_paths_and_terminals_without_utf8_are_no_error(job_root):
    root = os.fsencode(job_root) + b"/\xff\n"
    saved(os.fsdecode(root), {"日本": np.zeros(1)})
    result = flashpoint("ls", os.fsdecode(root), "--json")
    assert json.loads(result.stdout)["job_roots"][0]["path"] == os.fsdecode(root)
    result = flashpoint("inspect", os.fsdecode(root + b"/step-100_ckpt"), env={"PYTHONIOENCODING": "ascii"})
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith(f"{job_root}/\\udcff\\n/step-100_ckpt  complete\n")
    assert "\\u65e5\\u672c\n" in result.stdout


def test_a_terminal_gets_colours_and_a_pipe_gets_none(job_root):
    container = saved(job_root)
    assert "\x1b[32mcomplete\x1b[0m" in flashpoint("inspect", container, env={"FORCE_COLOR": "1"}).stdout
    assert "\x1b" not in flashpoint("inspect", container).stdout


def test_columns_line_up_where_characters_are_wide(capsys):
    page = Page()
    page.table(["name", ">size", "x"], [["日本", "1", "a"], ["b", "22", ""]])
    page.show()
    assert capsys.readouterr().out == "  name  size  x\n  日本     1  a\n  b       22\n"


def test_nothing_heavy_is_imported_before_a_command_runs():
    code = "import sys, flashpoint.cli; print({'rich', 'torch', 'jax'} & set(sys.modules))"
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    assert subprocess.check_output([sys.executable, "-c", code], text=True, env=env) == "set()\n"
    assert flashpoint("--version").stdout.startswith("flashpoint 0.")
