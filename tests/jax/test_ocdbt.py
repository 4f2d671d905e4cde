"""OCDBT: what we write, stock TensorStore reads; what it writes, we read; what is neither is an error."""

import contextlib
import random
from collections.abc import Callable

import pytest
import tensorstore as ts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashpoint.errors import FlashpointError, ManifestError
from flashpoint_jax import ocdbt
from flashpoint_jax import ocdbt_nodes as nodes_of
from flashpoint_jax import ocdbt_wire as wire
from flashpoint_jax.errors import OcdbtError
from flashpoint_jax.ocdbt import Reader, Reference, encode_nodes, manifest_of
from tests.jax.databases import (
    UUID,
    database,
    fetch_from,
    files_below,
    our_contents,
    resolve,
    stock,
    stock_contents,
    write,
)

BLOB = random.Random(0).randbytes(1 << 16)
FILES = {"rank00000-0.safetensors": BLOB, "rank00001-0.safetensors": BLOB[::-1], "sub/other": b"x" * 99}

KEYS = st.binary(max_size=12) | st.sampled_from(
    [b"", b"\0", b"a", b"a\0", b"a\0\0", b"a/b", b"a/b/0.0", b"a/b/0.1", b"\xff" * 7, b"k" * 300]
)
REFERENCES = st.builds(
    lambda file, offset, length: Reference(file, offset, min(length, len(FILES[file]) - offset)),
    st.sampled_from(sorted(FILES)),
    st.integers(0, 99),
    st.integers(0, 50_000),
)
PAIRS = st.dictionaries(KEYS, st.binary(max_size=40) | REFERENCES, max_size=40)


def many(n: int) -> dict[bytes, ocdbt.Value]:
    """Keys as an index has them."""
    pairs: dict[bytes, ocdbt.Value] = {}
    for i in range(n // 2):
        pairs[f"params.layers.{i}.kernel/.zarray".encode()] = b'{"shape":[%d]}' % i
        pairs[f"params.layers.{i}.kernel/0.0".encode()] = Reference("rank00000-0.safetensors", i, 64)
    return pairs


# ---- what we write, stock TensorStore reads -----------------------------------------------------


@pytest.mark.parametrize("n", [0, 2, 1_000, 50_000])
def test_stock_tensorstore_lists_and_reads_every_key(tmp_path, n):
    pairs = many(n)
    write(str(tmp_path), {**FILES, **database(pairs)})
    assert stock_contents(str(tmp_path)) == {key: resolve(value, FILES) for key, value in pairs.items()}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(PAIRS, st.sampled_from([1, 100, 1000]))
def test_any_pairs_are_read_back_by_stock_tensorstore_and_by_us(tmp_path_factory, pairs, node_bytes):
    folder = str(tmp_path_factory.mktemp("db"))
    files = {**FILES, **database(pairs, node_bytes=node_bytes)}
    write(folder, files)
    wanted = {key: resolve(value, FILES) for key, value in pairs.items()}
    assert stock_contents(folder) == wanted
    assert our_contents(files) == wanted
    assert list(our_contents(files)) == sorted(wanted)


def test_stock_tensorstore_lists_a_prefix_and_a_range(tmp_path):
    pairs = many(2_000)
    write(str(tmp_path), {**FILES, **database(pairs, node_bytes=1000)})
    begin, end = b"params.layers.12", b"params.layers.13"
    listed = stock(str(tmp_path)).list(ts.KvStore.KeyRange(begin, end)).result()
    assert sorted(listed) == [key for key in sorted(pairs) if begin <= key < end]


def test_stock_tensorstore_may_go_on_with_the_database(tmp_path):
    write(str(tmp_path), {**FILES, **database(many(2_000), node_bytes=1000)})
    store = stock(str(tmp_path))
    store["new"] = b"value"
    del store["params.layers.7.kernel/0.0"]
    contents = stock_contents(str(tmp_path))
    assert contents[b"new"] == b"value"
    assert len(contents) == 2_000
    assert our_contents(files_below(str(tmp_path))) == contents


def test_statistics_are_those_that_stock_tensorstore_counts(tmp_path):
    pairs = many(2_000)
    nodes = encode_nodes(pairs, "nodes.ocdbt", node_bytes=1000)
    write(str(tmp_path), {"nodes.ocdbt": nodes.data, ocdbt.MANIFEST_NAME: manifest_of(nodes, UUID)})
    dumped = ts.ocdbt.dump(ts.KvStore.open(f"file://{tmp_path}/").result()).result()
    (version,) = dumped["versions"]
    assert version["root"]["statistics"] == {
        "num_keys": 2_000,
        "num_tree_bytes": len(nodes.data),
        "num_indirect_value_bytes": 64 * 1_000,
    }
    assert version["root_height"] == nodes.height >= 2


# ---- what it writes, we read --------------------------------------------------------------------


@pytest.mark.parametrize("compression", [None, {"id": "zstd"}], ids=["plain", "zstd"])
def test_databases_of_stock_tensorstore_are_read(tmp_path, compression):
    if compression:
        pytest.importorskip("zstandard")
    config = {
        "compression": compression,
        "max_decoded_node_bytes": 2000,
        "max_inline_value_bytes": 20,
        "version_tree_arity_log2": 1,
    }
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{tmp_path}/", "config": config}).result()
    generator = random.Random(1)
    for _ in range(12):
        with ts.Transaction() as transaction:
            for _ in range(150):
                key = f"key/{generator.randrange(900):x}/{'a' * generator.randrange(9)}"
                store.with_transaction(transaction)[key] = generator.randbytes(generator.randrange(60))
    files = files_below(str(tmp_path))
    reader = Reader(fetch_from(files))
    wanted = stock_contents(str(tmp_path))
    assert reader.newest.height >= 1
    assert our_contents(files) == wanted
    for key in [*wanted, b"", b"key", b"zzz", b"key/0"]:
        value = reader.get(key)
        assert (None if value is None else resolve(value, files)) == wanted.get(key)
    under = {key: resolve(value, files) for key, value in reader.items(b"key/3")}
    assert under == {key: value for key, value in wanted.items() if key.startswith(b"key/3")}
    versions = list(reader.versions())
    assert [version.generation for version in versions] == sorted(
        (version.generation for version in versions), reverse=True
    )
    assert len(versions) == reader.newest.generation >= 12
    sizes = [sum(1 for _ in reader.items(version=version)) for version in versions]
    assert sizes[0] == len(wanted)
    assert sizes == sorted(sizes, reverse=True)


def test_a_database_that_was_emptied_is_read_as_empty(tmp_path):
    store = ts.KvStore.open(
        {"driver": "ocdbt", "base": f"file://{tmp_path}/", "config": {"compression": None}}
    ).result()
    store["a"] = b"b"
    del store["a"]
    reader = Reader(fetch_from(files_below(str(tmp_path))))
    assert dict(reader.items()) == {}
    assert reader.get(b"a") is None


def test_databases_that_were_merged_out_of_sub_folders_are_read(tmp_path):
    """As Orbax merges those of its processes: nodes below carry a base path, and stay where they are."""
    context = ts.Context()
    config = {"compression": None, "max_inline_value_bytes": 4, "max_decoded_node_bytes": 500}

    def opened(folder: str) -> ts.KvStore:
        spec = {"driver": "ocdbt", "base": f"file://{tmp_path}/{folder}", "config": config}
        return ts.KvStore.open(spec, context=context).result()

    with ts.Transaction(atomic=True) as transaction:
        for rank in range(2):
            part = opened(f"process_{rank}/")
            for i in range(60):
                part[f"{rank}/{i}"] = f"value {rank} {i}".encode()
            part.experimental_copy_range_to(opened("").with_transaction(transaction)).result()
    files = files_below(str(tmp_path))
    assert our_contents(files) == stock_contents(str(tmp_path))
    assert len(our_contents(files)) == 120


# ---- the same in, the same out ------------------------------------------------------------------


@given(PAIRS, st.randoms())
def test_the_same_pairs_in_any_order_give_the_same_bytes(pairs, shuffled):
    rows = list(pairs.items())
    shuffled.shuffle(rows)
    assert encode_nodes(rows, "nodes") == encode_nodes(pairs, "nodes")


def test_nodes_do_not_depend_on_the_version_and_manifests_are_small(tmp_path):
    nodes = encode_nodes(many(2_000), "nodes.ocdbt")
    one, other = manifest_of(nodes, b"1" * 16), manifest_of(nodes, b"2" * 16, commit_time_ns=5)
    assert one != other
    assert len(one) < 200
    assert Reader(fetch_from({"manifest.ocdbt": other, "nodes.ocdbt": nodes.data})).newest.commit_time_ns == 5


def test_nodes_have_about_the_size_that_was_asked_for():
    nodes = encode_nodes(many(50_000), "nodes.ocdbt")
    reader = Reader(fetch_from({"manifest.ocdbt": manifest_of(nodes, UUID), "nodes.ocdbt": nodes.data}))
    root = reader._load(nodes.root, nodes.height, b"", b"", None)
    sizes = [child.length for child in root.children]
    assert max(sizes) <= ocdbt.NODE_BYTES
    assert min(sizes[:-1]) > ocdbt.NODE_BYTES // 2


@given(st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 300), max_size=50))
def test_numbers_of_every_width_are_read_back(numbers):
    cursor = wire.Cursor(wire.varints(numbers), 0, "a test")
    assert cursor.varints(len(numbers)).tolist() == numbers
    cursor.end()


@given(st.lists(KEYS, max_size=30))
def test_a_shared_prefix_is_as_long_as_it_can_be(names):
    names.sort()
    shared = wire.shared_prefixes(names).tolist()
    for before, name, n in zip(names, names[1:], shared[1:], strict=False):
        assert name[:n] == before[:n]
        assert n == min(len(name), len(before)) or name[n] != before[n]


def test_long_names_share_prefixes_too():
    names = [b"p" * 60_000 + b"%03d" % i for i in range(500)]
    assert wire.shared_prefixes(names)[1:].min() >= 60_000


# ---- what cannot be written ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pairs", "text"),
    [
        ([(b"a", b"1"), (b"a", b"2")], "given twice"),
        ([(b"a" * 65_536, b"")], "more than 65535 bytes"),
        ([(b"a", bytes((1 << 20) + 1))], "more than 1048576 bytes"),
        ([(b"a", Reference("../x", 0, 1))], "plain path below its folder"),
        ([(b"a", Reference("/x", 0, 1))], "plain path below its folder"),
        ([(b"a", Reference("x//y", 0, 1))], "plain path below its folder"),
        ([(b"a", Reference("", 0, 1))], "plain path below its folder"),
    ],
)
def test_what_stock_tensorstore_would_refuse_is_not_written(pairs, text):
    with pytest.raises(OcdbtError, match=text):
        encode_nodes(pairs, "nodes")


def test_the_largest_inline_value_and_the_longest_key_are_written(tmp_path):
    pairs = {b"k" * 65_535: b"1", b"large": bytes(1 << 20), b"z": b""}
    write(str(tmp_path), database(pairs))
    assert stock_contents(str(tmp_path)) == pairs


# ---- what is no database ------------------------------------------------------------------------

SMALL = database({b"a/.zarray": b"{}", b"a/0": Reference("f", 5, 7), b"b/.zarray": b"{}" * 9}, node_bytes=1)


def read_all(files: dict[str, bytes]) -> None:
    reader = Reader(fetch_from(files))
    for version in reader.versions():
        list(reader.items(version=version))
    reader.get(b"a/0")


@pytest.mark.fault(20)
@pytest.mark.parametrize("name", sorted(SMALL))
def test_any_flipped_bit_is_an_error(name):
    for position in range(len(SMALL[name])):
        for bit in range(8):
            broken = bytearray(SMALL[name])
            broken[position] ^= 1 << bit
            with pytest.raises(OcdbtError):
                read_all({**SMALL, name: bytes(broken)})


@pytest.mark.parametrize("name", sorted(SMALL))
def test_a_file_that_was_cut_off_is_an_error(name):
    for nbytes in range(len(SMALL[name])):
        with pytest.raises(OcdbtError):
            read_all({**SMALL, name: SMALL[name][:nbytes]})


def test_stock_tensorstore_agrees_that_a_flipped_bit_is_an_error(tmp_path):
    for name in sorted(SMALL):
        for position in range(0, len(SMALL[name]), 7):
            broken = bytearray(SMALL[name])
            broken[position] ^= 1
            folder = tmp_path / f"{name}-{position}"
            write(str(folder), {**SMALL, name: bytes(broken)})
            with pytest.raises(ValueError):
                stock_contents(str(folder))


def bodies() -> list[tuple[int, bytes, Callable[[bytes], object]]]:
    """Each kind of piece, without its envelope, and its decoder."""
    file = wire.File("", "f")
    child = nodes_of.NodeReference(file, 3, 4, nodes_of.Statistics(1, 2, 3))
    versions = nodes_of.VersionsReference(file, 0, 0, 8, 8, 1)
    keys = [b"a/.zarray", b"a/0", b"ab", b"b" * 40]
    leaf, _ = nodes_of.encode_leaf(
        keys, wire.shared_prefixes(keys), [b"{}", Reference("f", 1 << 40, 9), Reference("g/h", 0, 0), b""]
    )
    rows = (
        wire.varints([2])
        + wire.varints([4, 8])
        + wire.varints([0, 0])
        + wire.varints([1, 300])
        + wire.varints([5, 6])
        + wire.varints([4, 4])
        + bytes(16)
    )
    version_node = b"\x02\x01" + wire.encode_files(["f"]) + rows
    return [
        (nodes_of.MANIFEST_MAGIC, SMALL["manifest.ocdbt"][14:-4], nodes_of.decode_manifest),
        (nodes_of.NODE_MAGIC, leaf[14:-4], nodes_of.decode_node),
        (nodes_of.NODE_MAGIC, nodes_of.encode_interior(1, keys, [child] * 4)[14:-4], nodes_of.decode_node),
        (
            nodes_of.VERSION_NODE_MAGIC,
            version_node,
            lambda data: nodes_of.decode_version_node(data, versions),
        ),
    ]


@pytest.mark.parametrize("kind", range(4), ids=["manifest", "leaf", "interior node", "version node"])
@settings(max_examples=400)
@given(st.data())
def test_whatever_lies_in_a_sealed_envelope_is_decoded_or_refused(kind, data):
    magic, body, decode = bodies()[kind]
    decode(wire.seal(magic, body))
    broken = bytearray(body)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(broken)))
        cut = data.draw(st.integers(0, 3))
        broken[at : at + cut] = data.draw(
            st.binary(max_size=4) | st.sampled_from([b"\xff" * 9 + b"\x01", b"\xff" * 10, b"\x80\x80\x04"])
        )
    with contextlib.suppress(OcdbtError):
        decode(wire.seal(magic, bytes(broken)))


@given(st.binary(max_size=60))
def test_random_bytes_are_no_database(data):
    with pytest.raises(OcdbtError):
        nodes_of.decode_manifest(data)
    with pytest.raises(OcdbtError):
        nodes_of.decode_node(data)


def sealed_tree(height: int) -> dict[str, bytes]:
    """Every node names the one below it twice, under two prefixes: 2**height keys."""
    file = wire.File("", "n")
    parts, position = [], 0
    statistics = nodes_of.Statistics(1, 1, 1)
    node, _ = nodes_of.encode_leaf([b""], wire.shared_prefixes([b""]), [b""])
    for level in range(height + 1):
        reference = nodes_of.NodeReference(file, position, len(node), statistics)
        parts.append(node)
        position += len(node)
        raw = bytearray(nodes_of.encode_interior(level + 1, [b"a", b"b"], [reference] * 2))
        # Both children imply one byte more of their keys.
        body = bytes(raw[14:-4]).replace(b"\x01\x01\x00\x00ab", b"\x01\x01\x01\x01ab")
        assert body != raw[14:-4]
        node = wire.seal(nodes_of.NODE_MAGIC, body)
    tree = ocdbt.Nodes("n", b"".join(parts), reference, height)
    return {"n": tree.data, "manifest.ocdbt": manifest_of(tree, UUID)}


def test_nodes_may_share_children_as_in_stock_tensorstore(tmp_path):
    files = sealed_tree(5)
    write(str(tmp_path), files)
    assert our_contents(files) == stock_contents(str(tmp_path))
    assert len(our_contents(files)) == 32


def test_a_walk_through_shared_nodes_ends(monkeypatch):
    monkeypatch.setattr(ocdbt, "KEYS_MAX", 1000)
    reader = Reader(fetch_from(sealed_tree(200)))
    with pytest.raises(OcdbtError, match="more than 1000 keys"):
        list(reader.items())
    assert reader.get(b"a" * 200) == b""
    assert reader.get(b"a" * 199) is None


def test_a_node_in_the_place_of_another_is_an_error():
    one = encode_nodes(many(200), "n", node_bytes=400)
    reader = Reader(fetch_from({"manifest.ocdbt": manifest_of(one, UUID), "n": one.data}))
    root = reader._load(one.root, one.height, b"", b"", None)
    first, second = root.children[:2]
    with pytest.raises(OcdbtError, match="parent does not put there"):
        reader._load(first, one.height - 1, b"", root.keys[1], None)
    with pytest.raises(OcdbtError, match="parent does not put there"):
        reader._load(second, one.height - 1, b"", root.keys[0], root.keys[1])
    with pytest.raises(OcdbtError, match="height"):
        reader._load(first, one.height, b"", root.keys[0], None)


def test_names_that_would_fill_the_memory_are_refused():
    """A column of lengths costs a byte a name, and each name may repeat all 65,535 bytes of the one before."""
    n = 100_000
    body = (
        b"\0\0"
        + wire.varints([n])
        + wire.varints([60_000] * (n - 1))
        + wire.varints([60_001] + [1] * (n - 1))
    )
    body += b"k" * 60_001 + bytes(n)
    with pytest.raises(OcdbtError, match="names are too long"):
        nodes_of.decode_node(wire.seal(nodes_of.NODE_MAGIC, body))


def test_a_compressed_body_that_would_fill_the_memory_is_refused(monkeypatch):
    zstandard = pytest.importorskip("zstandard")
    monkeypatch.setattr(wire, "BODY_BYTES_MAX", 1 << 16)
    packed = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    raw = bytearray(wire.seal(nodes_of.NODE_MAGIC, packed)[:-4])
    raw[13] = 1
    sealed = bytes(raw) + wire.google_crc32c.value(bytes(raw)).to_bytes(4, "little")
    with pytest.raises(OcdbtError, match="when decompressed"):
        nodes_of.decode_node(sealed)


def test_an_index_error_is_ours_but_does_not_condemn_the_version():
    assert issubclass(OcdbtError, FlashpointError)
    assert not issubclass(OcdbtError, ManifestError)
