"""One way to fuzz a parser of bytes that come from outside: valid bytes, changed, and bytes of chance.

Whatever the bytes, a parser ends soon, takes little memory, and raises nothing but its own errors. Plain runs try few
examples of each; `make soak` tries `SOAK` of each.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any, Final

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

FEW: Final = 100
SOAK: Final = 100_000
SECONDS_MAX: Final = 10.0  # for what takes milliseconds, on loaded cores
PEAK_BYTES: Final = 8 << 20  # beside what is in proportion to the input
PEAK_FACTOR: Final = 64

# Lengths and numbers that parsers stumble over, in the spellings of the formats that there are here.
_NASTY: Final = (
    b"\0", b"\xff", b"\x7f" + b"\xff" * 7, b"\xff" * 8, b"\x80" * 10, b"\xff" * 9 + b"\x01", bytes(8),
    (1 << 62).to_bytes(8, "little"), (1 << 62).to_bytes(8, "big"), b"4611686018427387904", b"-1", b"0", b"1e999",
    b"NaN", b"99999999999999999999999999", b"null", b"[" * 2000, b'{"a":' * 2000, b'"\\ud800"', b"../../etc/passwd",
    b"/etc/passwd", b"\0" * 64, b"\xc3\x28", b"\x91" * 2000, b"\xdd\x7f\xff\xff\xff", b"\xdb\x7f\xff\xff\xff",
)  # fmt: skip

_KINDS: Final = 7
_EDIT_BYTES: Final = 9  # of a program: what to do, where, with what
_EDITS_MAX: Final = 6


def changed(corpus: Sequence[bytes], program: bytes) -> bytes:
    """Bytes of the corpus after the edits that ``program`` stands for; now and then the program itself.

    To draw bytes costs a tenth of drawing edits one by one, and a shorter program is a simpler example all the same.
    """
    if not program or program[0] > 240:
        return program
    made = bytearray(corpus[program[0] % len(corpus)])
    for begin in range(1, len(program), _EDIT_BYTES):
        edit = program[begin : begin + _EDIT_BYTES].ljust(_EDIT_BYTES, b"\0")
        kind, where, what = (
            edit[0] % _KINDS,
            int.from_bytes(edit[1:5], "big"),
            int.from_bytes(edit[5:], "big"),
        )
        place = where % (len(made) + 1)
        if kind == 0:
            made[place : place + 1] = bytes([what % 256])
        elif kind == 1 and place < len(made):
            made[place] ^= 1 << what % 8
        elif kind == 2:
            made[place:place] = what.to_bytes(4, "little")[: 1 + what % 4]
        elif kind == 3:
            del made[place : place + 1 + what % 16]
        elif kind == 4:
            made[place : place + what // len(_NASTY) % 9] = _NASTY[what % len(_NASTY)]
        elif kind == 5:
            other = corpus[what % len(corpus)]
            made[place:] = other[what // len(corpus) % (len(other) + 1) :]
        elif kind == 6:
            made[place:place] = made[place : place + 1 + what % 64] * (2 + what % 30)
    return bytes(made)


def survives(
    parse: Callable[[bytes], Any],
    corpus: Sequence[bytes],
    errors: type[Exception] | tuple[type[Exception], ...],
    *,
    examples: int = FEW,
    peak_bytes: int = PEAK_BYTES,
    repaired: Callable[[bytes], bytes] | None = None,
) -> int:
    """Assert that a parser survives; how many of the changed bytes it took for good ones.

    Args:
        errors: that it may raise.
        repaired: makes checksums right again, or else nearly all that is behind them stays in the dark; half of
            the examples are given as they are.
    """
    for data in corpus:
        parse(data)  # the corpus is valid, or else nothing is tested
    passed = 0

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
    )
    @given(st.binary(max_size=1 + _EDITS_MAX * _EDIT_BYTES), st.booleans())
    def run(program: bytes, as_it_is: bool) -> None:
        nonlocal passed
        data = changed(corpus, program)
        if repaired is not None and not as_it_is:
            data = repaired(data)
        tracemalloc.start()
        begin_s = time.perf_counter()
        try:
            parse(data)
            passed += 1
        except errors:
            pass
        finally:
            took_s = time.perf_counter() - begin_s
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert took_s < SECONDS_MAX, f"{took_s:.1f} s for {len(data)} bytes"
        assert peak < peak_bytes + PEAK_FACTOR * len(data), f"{peak} bytes of memory for {len(data)}"

    run()
    return passed
