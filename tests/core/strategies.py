"""Hypothesis strategies that several test files share."""

from collections.abc import Callable

from hypothesis import strategies as st

from flashpoint.dtypes import DTYPES
from flashpoint.layout import Entry

NAMES = st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from(
    [
        "__metadata__",
        "__pad__.0",
        "__pad__.x",
        "a",
        "a@0",
        "a@4",
        "a@4@0",
        "model/weight",
        "line\nbreak",
        "ß.権重",
    ]
)


@st.composite
def entries(draw: Callable, names: st.SearchStrategy[str] = NAMES) -> list[Entry]:
    """Entries of one object: whole tensors and shards, empty ones too, no shard given twice."""
    found: dict[tuple, Entry] = {}
    for _ in range(draw(st.integers(0, 12))):
        shape = tuple(draw(st.lists(st.integers(0, 70), max_size=3)))
        origin = whole = ()
        if shape and draw(st.booleans()):
            origin = tuple(draw(st.integers(0, 5)) for _ in shape)
            whole = tuple(o + n + draw(st.integers(0, 3)) for o, n in zip(origin, shape, strict=True))
        entry = Entry(
            draw(names),
            draw(st.sampled_from(sorted(DTYPES))),
            shape,
            origin,
            whole,
            path=tuple(draw(st.lists(NAMES | st.integers(), max_size=3))),
            codec=draw(st.sampled_from(["", "torch"])),
        )
        found[entry.name, entry.origin] = entry
    return list(found.values())


@st.composite
def mutated(draw: Callable, data: bytes) -> bytes:
    """``data`` with bytes flipped, removed, doubled or replaced by what JSON is made of."""
    broken = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        begin = draw(st.integers(0, max(len(broken) - 1, 0)))
        end = min(begin + draw(st.integers(0, 8)), len(broken))
        kind = draw(st.integers(0, 3))
        if kind == 0 and broken:
            broken[begin] ^= 1 << draw(st.integers(0, 7))
        elif kind == 1:
            del broken[begin:end]
        elif kind == 2:
            broken[begin:begin] = broken[begin:end]
        else:
            broken[begin:end] = draw(
                st.sampled_from([b"-1", b"0", b"1e99", b"9" * 30, b'"', b"[", b"}", b",", b"null"])
            )
    return bytes(broken)
