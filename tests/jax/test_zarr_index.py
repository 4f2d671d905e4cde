"""The index over a version's objects: stock TensorStore and stock Orbax read the arrays where they lie."""

import itertools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashpoint.dtypes import DTYPES
from flashpoint.errors import FlashpointError
from flashpoint.layout import Entry, plan_layout
from flashpoint_jax import zarr_index
from flashpoint_jax.chunk_grid import CHUNKS_PER_SHARD_MAX
from flashpoint_jax.errors import NotIndexableError
from flashpoint_jax.ocdbt import MANIFEST_NAME, Reference
from flashpoint_jax.zarr_index import (
    CRC_BYTES,
    Source,
    array_name,
    index_files,
    plan_index,
    seal_checksums,
    sources_of,
    uuid_of,
    zarr_pairs,
)
from tests.core.world import Job, contents
from tests.jax.databases import (
    UUID,
    bytes_of,
    files_below,
    object_file,
    our_contents,
    random_array,
    stock,
    stock_array,
    stock_contents,
    version,
    write,
)

DRIVERS = {2: "zarr", 3: "zarr3"}
both = pytest.mark.parametrize("zarr_format", [2, 3])

UNKNOWN = {"float8_e4m3", "uint4", "uint2", "complex32", "float4_e2m1fn_x2"}
KNOWN = sorted(set(DTYPES) - UNKNOWN)


def check(
    folder: str, arrays: dict[str, np.ndarray], objects: list[list[Entry]], zarr_format=2, **options
) -> None:
    """Stock TensorStore reads these arrays, bit for bit, from an index over these objects."""
    sources = version(folder, arrays, objects, **options)
    write(folder, index_files(sources, UUID, zarr_format=zarr_format))
    for name, array in arrays.items():
        read = stock_array(folder, name, DRIVERS[zarr_format])
        assert read.dtype == array.dtype
        assert read.shape == array.shape
        assert bytes_of(read) == bytes_of(array)


def cut(name: str, dtype: str, shape: tuple[int, ...], *parts: tuple[int, ...]) -> list[Entry]:
    """The shards of an array whose dimensions are cut into parts of these sizes."""
    entries = []
    for sizes in itertools.product(*map(enumerate, parts)):
        origin = tuple(sum(parts[dim][:i]) for dim, (i, _) in enumerate(sizes))
        entries.append(Entry(name, dtype, tuple(n for _, n in sizes), origin, shape))
    return entries


def dealt(entries: list[Entry], ranks: int) -> list[list[Entry]]:
    return [entries[rank::ranks] for rank in range(ranks)]


# ---- whole arrays -------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("dtype", KNOWN)
def test_every_dtype_that_tensorstore_knows_is_read_bit_for_bit(tmp_path, dtype, zarr_format):
    arrays = {
        f"params.{len(shape)}": random_array(DTYPES[dtype].numpy, shape, len(shape))
        for shape in [(), (7,), (3, 5), (2, 3, 4)]
    }
    entries = [Entry(name, dtype, array.shape) for name, array in arrays.items()]
    check(str(tmp_path), arrays, [entries], zarr_format)


@both
@pytest.mark.parametrize("dtype", sorted(UNKNOWN))
def test_a_dtype_that_tensorstore_does_not_know_is_refused_by_name(dtype, zarr_format):
    layout = plan_layout([Entry("params.w", dtype, (4,)), Entry("params.b", "float32", (4,))])
    with pytest.raises(NotIndexableError, match=rf"'params.w': TensorStore has no data type {dtype}"):
        index_files([Source("f", layout)], UUID, zarr_format=zarr_format)
    index = plan_index([Source("f", layout)], zarr_format=zarr_format)
    assert list(index.refused) == ["params.w"]
    # No key of it is there: what is missing is an error for stock readers, half an array is zeros.
    keys = zarr_pairs([Source("f", layout)], zarr_format=zarr_format)[0]
    assert not any(key.startswith(b"params.w") for key in keys)
    assert any(key.startswith(b"params.b") for key in keys)


@pytest.mark.parametrize("dtype", sorted(UNKNOWN - {"complex32", "float4_e2m1fn_x2"}))
def test_tensorstore_still_does_not_know_them(dtype):
    with pytest.raises((TypeError, ValueError)):
        ts.dtype(dtype)


@both
def test_arrays_without_elements_are_there(tmp_path, zarr_format):
    arrays = {f"empty.{i}": np.zeros(shape, np.float32) for i, shape in enumerate([(0,), (3, 0), (0, 4, 5)])}
    entries = [Entry(name, "float32", array.shape) for name, array in arrays.items()]
    check(str(tmp_path), arrays, [entries], zarr_format)


@both
@pytest.mark.parametrize("n", [1, 1_000])
def test_many_arrays(tmp_path, n, zarr_format):
    arrays = {f"layers.{i}.kernel": random_array(np.dtype(np.float32), (i % 5, 3), i) for i in range(n)}
    entries = [Entry(name, "float32", array.shape) for name, array in arrays.items()]
    check(str(tmp_path), arrays, dealt(entries, 4), zarr_format)


def test_50_000_arrays(tmp_path):
    n = 50_000
    entries = [Entry(f"layers.{i}.kernel", "int32", (2, 2)) for i in range(n)]
    layout = plan_layout(entries)
    data = np.zeros(layout.nbytes, np.uint8)
    for i, begin in enumerate(layout.begins):
        data[begin : begin + 16].view(np.int32)[:] = i
    write(str(tmp_path), {"rank00000-0.safetensors": data.tobytes()})
    write(str(tmp_path), index_files([Source("rank00000-0.safetensors", layout)], UUID))
    assert len(stock(str(tmp_path)).list().result()) == 2 * n
    for i in (0, 1, 777, n - 1):
        assert (stock_array(str(tmp_path), f"layers.{i}.kernel", "zarr") == i).all()


# ---- shards -------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        ((8,), [(2,) * 4]),
        ((8, 6), [(2,) * 4, (6,)]),
        ((8, 6), [(8,), (2,) * 3]),
        ((8, 6), [(4, 4), (3, 3)]),
        ((4, 8, 6), [(2, 2), (4, 4), (3, 3)]),
        ((1, 8), [(1,), (2,) * 4]),
        # Rows that are dealt unevenly: as torch does, and in no order at all.
        ((10,), [(3, 3, 3, 1)]),
        ((10, 4), [(3, 3, 3, 1), (4,)]),
        ((10, 4), [(3, 3, 3, 1), (2, 2)]),
        ((11, 4), [(2, 5, 4), (4,)]),
        ((12, 4), [(2, 6, 4), (2, 2)]),
        ((9, 3), [(9, 0, 0), (3,)]),
        # Columns that are: each part of a row is a range of its own.
        ((4, 10), [(4,), (3, 3, 3, 1)]),
        ((5, 9), [(2, 3), (4, 5)]),
        # Stacked layers, cut in the middle, unevenly: each layer of a shard is a range of its own.
        ((3, 10, 4), [(3,), (4, 4, 2), (4,)]),
        ((3, 7, 4), [(1, 2), (3, 4), (2, 2)]),
    ],
)
def test_shardings_whose_pieces_are_ranges_are_read(tmp_path, shape, parts, zarr_format):
    for dtype in ("bfloat16", "float64"):
        arrays = {"w": random_array(DTYPES[dtype].numpy, shape, 3)}
        check(str(tmp_path / dtype), arrays, dealt(cut("w", dtype, shape, *parts), 3), zarr_format)


def test_a_grid_of_too_many_pieces_is_refused_by_name():
    n = 3 * CHUNKS_PER_SHARD_MAX
    for parts in [
        ((n // 2, n // 2 + 1, 1), (4,)),
        ((n + 2,), (3, 4, 1)),
    ]:  # rows, and columns, of no common size
        entries = cut("w", "float32", (n + 2, sum(parts[1])), *parts) + cut(
            "v", "int8", (4, 4), (2, 2), (2, 2)
        )
        _, refused = zarr_pairs([Source(f"f{i}", plan_layout([entry])) for i, entry in enumerate(entries)])
        assert list(refused) == ["w"]
        assert f"more than {CHUNKS_PER_SHARD_MAX} chunks" in refused["w"]


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        (cut("w", "float32", (8,), (4, 4))[:1], "do not cover it"),
        (cut("w", "float32", (8, 8), (4, 4), (4, 4))[:3], "do not cover it"),
        ([Entry("w", "float32", (0,), (0,), (4,))], "do not cover it"),
        ([Entry("w", "float32", (6,), (0,), (8,)), Entry("w", "float32", (4,), (4,), (8,))], "overlap"),
        ([Entry("w", "float32", (4,), (0,), (8,)), Entry("w", "int32", (4,), (4,), (8,))], "differ in dtype"),
        ([Entry("w", "float32", (4,), (0,), (8,)), Entry("w", "float32", (4,), (4,), (9,))], "global shape"),
        ([Entry("a.b", "int8", ()), Entry("x", "int8", (), path=("a", "b"))], "same name for Orbax"),
        ([Entry("", "int8", ())], "empty"),
    ],
)
def test_arrays_that_are_not_whole_or_not_one_are_refused(entries, text):
    sources = [Source(f"f{i}", plan_layout([entry])) for i, entry in enumerate(entries)]
    with pytest.raises(NotIndexableError, match=text):
        index_files(sources, UUID)


def test_of_replicas_the_first_is_named(tmp_path):
    whole = Entry("step", "int64", (3,))
    arrays = {"step": np.arange(3), "w": np.arange(8)}
    shards = cut("w", "int64", (8,), (4, 4))
    pairs, refused = zarr_pairs(
        version(str(tmp_path), arrays, [[whole, *shards], [whole, *reversed(shards)]])
    )
    assert not refused
    assert {value.file for value in pairs.values() if isinstance(value, Reference)} == {
        "rank00000-0.safetensors"
    }
    check(str(tmp_path), arrays, [[whole, *shards], [whole, *reversed(shards)]])


def test_a_whole_copy_is_taken_before_shards(tmp_path):
    arrays = {"w": np.arange(8)}
    objects = [cut("w", "int64", (8,), (3, 5))[:1], [Entry("w", "int64", (8,))]]
    check(str(tmp_path), arrays, objects)


def test_pickled_values_are_no_arrays():
    layout = plan_layout([Entry("blob", "uint8", (9,), codec="torch"), Entry("a", "int8", (), codec="numpy")])
    pairs, refused = zarr_pairs([Source("f", layout)])
    assert sorted(pairs) == [b"a/.zarray", b"a/0"]
    assert not refused


@st.composite
def sharded(draw) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        size = draw(st.integers(1, 4))
        even = draw(st.booleans())
        parts.append(
            (size,) * draw(st.integers(1, 3))
            if even
            else tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
        )
    return tuple(map(sum, parts)), parts


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sharded(), st.sampled_from(["int16", "float64"]), st.integers(1, 3), st.sampled_from([2, 3]))
def test_any_small_sharding_is_read_bit_for_bit(tmp_path_factory, sharding, dtype, ranks, zarr_format):
    shape, parts = sharding
    folder = str(tmp_path_factory.mktemp("version"))
    arrays = {"w": random_array(DTYPES[dtype].numpy, shape, 0), "v": np.arange(4)}
    entries = [*cut("w", dtype, shape, *parts), Entry("v", "int64", (4,))]
    check(folder, arrays, dealt(entries, ranks), zarr_format)


# ---- the last chunk -----------------------------------------------------------------------------


def test_a_last_chunk_that_is_cut_short_runs_on_into_the_pad(tmp_path):
    # 3 rows and 1 row of 16 bytes: the second shard's chunk has 48 bytes, of which 16 are the array's.
    arrays = {"w": random_array(np.dtype(np.float32), (4, 4), 0)}
    shards = cut("w", "float32", (4, 4), (3, 1), (4,))
    sources = version(str(tmp_path), arrays, [[shard] for shard in shards])
    pairs, _ = zarr_pairs(sources)
    assert pairs[b"w/1.0"] == Reference("rank00001-0.safetensors", sources[1].layout.begins[0], 48)
    check(str(tmp_path), arrays, [[shard] for shard in shards])


def page_filling() -> list[Entry]:
    """Shards of 3 and 1 rows; the last fills its page, so that nothing lies behind it."""
    return cut("w", "uint8", (4, 4096), (3, 1), (4096,))


def test_without_a_pad_to_run_on_into_the_chunks_are_smaller(tmp_path):
    arrays = {"w": random_array(np.dtype(np.uint8), (4, 4096), 0)}
    objects = [[shard] for shard in page_filling()]
    check(str(tmp_path), arrays, objects)
    pairs, _ = zarr_pairs(version(str(tmp_path), arrays, objects))
    assert len(pairs) == 1 + 4


def test_a_layout_with_tail_bytes_leaves_room_for_it(tmp_path):
    arrays = {"w": random_array(np.dtype(np.uint8), (4, 4096), 0)}
    objects = [[shard] for shard in page_filling()]
    check(str(tmp_path), arrays, objects, tail_bytes=2 * 4096)
    pairs, _ = zarr_pairs(version(str(tmp_path), arrays, objects, tail_bytes=2 * 4096))
    assert len(pairs) == 1 + 2


def test_what_an_object_would_have_to_have_behind_it_is_told():
    n = 2 * CHUNKS_PER_SHARD_MAX
    shards = cut("w", "uint8", (2 * n - 1, 4096), (n, n - 1), (4096,))  # single rows would be too many
    sources = [Source(f"f{i}", plan_layout([shard])) for i, shard in enumerate(shards)]
    _, refused = zarr_pairs(sources)
    assert "needs 4096 bytes more" in refused["w"]
    assert "tail_bytes" in refused["w"]
    sources = [Source(f"f{i}", plan_layout([shard], tail_bytes=4096)) for i, shard in enumerate(shards)]
    assert not zarr_pairs(sources)[1]


# ---- checksums ----------------------------------------------------------------------------------


def sealed_version(folder: str) -> tuple[dict[str, np.ndarray], list[Source]]:
    arrays = {
        "w": random_array(np.dtype(np.float32), (8, 6), 1),
        "scalar": random_array(np.dtype(np.int64), (), 2),
        "large": random_array(np.dtype(np.uint8), (3 << 20,), 3),
        "empty": np.zeros((0, 3), np.float32),
    }
    shards = cut("w", "float32", (8, 6), (4, 4), (3, 3))
    wholes = [
        Entry(name, arrays[name].dtype.name, arrays[name].shape) for name in ("scalar", "large", "empty")
    ]
    sources = []
    for rank, entries in enumerate([[*shards[:2], *wholes], shards[2:]]):
        layout, data = object_file(arrays, entries, trailer_bytes=CRC_BYTES)
        writable = np.frombuffer(data, np.uint8)
        seal_checksums(writable, layout)
        name = f"rank{rank:05d}-0.safetensors"
        write(folder, {name: bytes(data)})
        sources.append(Source(name, layout))
    return arrays, sources


def test_chunks_with_checksums_are_read_and_a_flipped_bit_is_an_error(tmp_path):
    arrays, sources = sealed_version(str(tmp_path))
    write(str(tmp_path), index_files(sources, UUID, zarr_format=3, checksums=True))
    for name, array in arrays.items():
        assert bytes_of(stock_array(str(tmp_path), name, "zarr3")) == bytes_of(array)
    layout = sources[0].layout
    data = bytearray((tmp_path / sources[0].file).read_bytes())
    i = [entry.name for entry in layout.entries].index("large")
    data[layout.begins[i] + 1234] ^= 4
    write(str(tmp_path), {sources[0].file: bytes(data)})
    with pytest.raises(ValueError, match="igest"):
        stock_array(str(tmp_path), "large", "zarr3")


def test_the_same_objects_are_read_without_checksums_too(tmp_path):
    arrays, sources = sealed_version(str(tmp_path))
    for zarr_format, driver in DRIVERS.items():
        write(str(tmp_path), index_files(sources, UUID, zarr_format=zarr_format))
        for name, array in arrays.items():
            assert bytes_of(stock_array(str(tmp_path), name, driver)) == bytes_of(array)


def test_checksums_need_a_layout_that_has_a_place_for_them():
    layout = plan_layout([Entry("w", "uint8", (4096,))])
    with pytest.raises(NotIndexableError, match="trailer_bytes=4"):
        index_files([Source("f", layout)], UUID, zarr_format=3, checksums=True)
    with pytest.raises(ValueError, match="behind every entry"):
        seal_checksums(np.zeros(layout.nbytes, np.uint8), layout)
    with pytest.raises(ValueError, match="must be 2 or 3"):
        index_files([Source("f", layout)], UUID, zarr_format=2, checksums=True)


def test_room_in_a_layout_is_a_pad_and_changes_nothing_by_default():
    entries = [Entry("a", "float32", (16,)), Entry("b", "uint8", (64,))]
    plain, roomy = plan_layout(entries), plan_layout(entries, trailer_bytes=CRC_BYTES, tail_bytes=5000)
    assert plan_layout(entries, trailer_bytes=0, tail_bytes=0) == plain
    assert [end - begin >= CRC_BYTES for begin, end in roomy.gaps] == [True, True]
    assert roomy.gaps[-1][1] - roomy.gaps[-1][0] >= 5000
    assert b"__pad__.1" in roomy.header


# ---- the files ----------------------------------------------------------------------------------


def test_equal_layouts_give_equal_nodes_and_each_version_a_manifest_of_its_own(tmp_path):
    layout = plan_layout([Entry("w", "float32", (4,))])
    one = index_files([Source("rank00000-0.safetensors", layout)], b"1" * 16)
    other = index_files([Source("rank00000-0.safetensors", layout)], b"2" * 16)
    (nodes,) = one.keys() - {MANIFEST_NAME}
    assert other[nodes] == one[nodes]
    assert other[MANIFEST_NAME] != one[MANIFEST_NAME]
    third = index_files([Source("rank00001-0.safetensors", layout)], b"1" * 16)
    assert nodes not in third
    zarr_index._plans.clear()  # another process gives the same
    assert index_files([Source("rank00000-0.safetensors", layout)], b"1" * 16) == one


def test_an_index_of_no_arrays_is_an_empty_database(tmp_path):
    write(str(tmp_path), index_files([], UUID))
    assert stock(str(tmp_path)).list().result() == []


def test_both_formats_may_lie_over_the_same_objects(tmp_path):
    arrays = {"w": np.arange(6.0).reshape(2, 3)}
    sources = version(str(tmp_path), arrays, [[Entry("w", "float64", (2, 3))]])
    for zarr_format, driver in DRIVERS.items():
        write(str(tmp_path), index_files(sources, UUID, zarr_format=zarr_format))
        assert (stock_array(str(tmp_path), "w", driver) == arrays["w"]).all()


def test_a_partial_index_leaves_out_what_it_cannot_have(tmp_path):
    layout = plan_layout([Entry("a", "uint4", (2,)), Entry("b", "int32", (2,))])
    write(
        str(tmp_path), {"f": bytes(layout.nbytes), **index_files([Source("f", layout)], UUID, partial=True)}
    )
    assert sorted(stock(str(tmp_path)).list().result()) == [b"b/.zarray", b"b/0"]


def test_the_error_names_the_first_ten_and_travels_between_processes():
    error = NotIndexableError({f"a{i}": "why" for i in range(12)})
    assert "'a9': why; and 2 more" in str(error)
    assert pickle.loads(pickle.dumps(error)).refused == error.refused
    assert isinstance(error, FlashpointError)


@both
def test_what_lies_on_another_node_is_an_error_and_not_zeros(tmp_path, zarr_format):
    arrays = {"w": np.arange(8.0), "everywhere": np.arange(3)}
    whole = Entry("everywhere", "int64", (3,))
    objects = [[shard, whole] for shard in cut("w", "float64", (8,), (4, 4))]
    sources = version(str(tmp_path), arrays, objects)
    (tmp_path / sources[0].file).unlink()
    files = index_files(sources, UUID, zarr_format=zarr_format, absent={sources[0].file})
    assert files != index_files(sources, UUID, zarr_format=zarr_format)
    write(str(tmp_path), files)
    spec = {
        "driver": DRIVERS[zarr_format],
        "kvstore": {"driver": "ocdbt", "base": f"file://{tmp_path}/", "path": "w/"},
    }
    array = ts.open(spec).result()  # as somebody opens it who does not know of fill_missing_data_reads
    assert (array[4:].read().result() == arrays["w"][4:]).all()
    with pytest.raises(ValueError):
        array.read().result()
    assert (stock_array(str(tmp_path), "everywhere", DRIVERS[zarr_format]) == arrays["everywhere"]).all()


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        (Entry("params/w", "int8", ()), "params/w"),
        (Entry("x", "int8", (), path=("params", "w")), "params.w"),
        (Entry("x", "int8", (), path=("opt", 0, (7,), "mu")), "opt.0.7.mu"),
    ],
)
def test_arrays_have_the_names_that_orbax_gives_them(entry, name):
    assert array_name(entry) == name


def test_names_with_slashes_dots_and_all_of_unicode_are_read(tmp_path):
    names = ["a", "a/0", "a/c", "a.b/c/0", "ß.権重", "a b%20?#", "x\ny"]
    arrays = {name: np.full((2,), i) for i, name in enumerate(names)}
    for zarr_format in (2, 3):
        check(str(tmp_path), arrays, [[Entry(name, "int64", (2,)) for name in names]], zarr_format)


def test_a_saved_version_is_indexed_from_its_manifest(job_root):
    job = Job(job_root, 3)
    try:
        job.save(1)
        rank = job.ranks[0]
        container = rank.objects.container(1)
        manifest = rank.objects.read_manifest(container)
        write(container.path, index_files(sources_of(manifest), uuid_of(manifest)))
        for name, array in contents(1).items():
            assert (stock_array(container.path, name, "zarr") == array).all()
    finally:
        job.close()


# ---- stock Orbax --------------------------------------------------------------------------------


def test_stock_orbax_restores_from_the_index_alone(tmp_path):
    """Into a target, also with another sharding than the one that was saved; its metadata files are optional."""
    state = {
        "params": {"kernel": np.arange(48.0, dtype=np.float32).reshape(8, 6), "bias": np.ones(6, np.float16)},
        "step": np.array(7, np.int32),
    }
    arrays = {
        "params.kernel": state["params"]["kernel"],
        "params.bias": state["params"]["bias"],
        "step": state["step"],
    }
    entries = [
        *cut("params.kernel", "float32", (8, 6), (2,) * 4, (3, 3)),
        Entry("params.bias", "float16", (6,)),
    ]
    sources = version(str(tmp_path), arrays, dealt([*entries, Entry("step", "int32", ())], 4))
    write(str(tmp_path), index_files(sources, UUID))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    by_rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    target = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), state)
    kernel = target["params"]["kernel"]
    target["params"]["kernel"] = jax.ShapeDtypeStruct(kernel.shape, kernel.dtype, sharding=by_rows)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path, target)
    assert restored["params"]["kernel"].sharding == by_rows
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((np.asarray(a) == b).all()), restored, state))


def test_what_stock_orbax_saved_is_read_by_our_reader(tmp_path):
    pytest.importorskip("zstandard")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", {"a": {"b": jnp.arange(6).reshape(2, 3)}, "c": jnp.zeros(())})
        checkpointer.wait_until_finished()
    folder = str(tmp_path / "saved")
    files = files_below(folder)
    assert our_contents(files) == stock_contents(folder)
    assert {b"a.b/.zarray", b"a.b/0.0", b"c/.zarray", b"c/0"} == set(our_contents(files))
