"""What the commands print: JSON for programs, aligned and coloured columns for people.

Names come from checkpoints, which anybody may have written: whatever could break a line or steer the
terminal is escaped here, in one place, and nothing is ever read as rich markup.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from flashpoint.memory import human_bytes

Cell = str | tuple[str, str]  # text, or text and its rich style


def print_json(data: Any) -> None:
    """One JSON document: on one line, but indented where a person looks at it."""
    indent = 2 if sys.stdout.isatty() else None
    sys.stdout.write(json.dumps(data, indent=indent, allow_nan=False) + "\n")


def printable(text: str) -> str:
    """The text on one line: control characters, bidi overrides and lone surrogates as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class Page:
    """Lines and tables, collected and printed at once by `show`.

    Columns are as wide as they must be and no line is cut or folded, so that a pipe into grep or awk
    sees whole rows. rich's own tables fold, and take a millisecond a row.
    """

    def __init__(self) -> None:
        self._lines: list[list[Cell]] = []

    def line(self, *cells: Cell) -> None:
        self._lines.append(list(cells))

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[Cell]], *, indent: int = 2) -> None:
        """Rows below a header; a column whose name begins with ``>`` is aligned to the right.

        The last column is the place for what may be long: no row is padded at its end.
        """
        from rich.cells import cell_len

        header: list[Cell] = [(name.lstrip(">"), "dim") for name in columns]
        table = [header, *([_escaped(cell) for cell in row] for row in rows)]
        widths = [[cell_len(_text(cell)) for cell in row] for row in table]
        column_widths = [max(column) for column in zip(*widths, strict=True)]
        for row, row_widths in zip(table, widths, strict=True):
            line: list[Cell] = [" " * indent]
            for i, cell in enumerate(row):
                pad = " " * (column_widths[i] - row_widths[i])
                line += [pad, cell, "  "] if columns[i].startswith(">") else [cell, pad, "  "]
            while len(line) > 1 and not _text(line[-1]).strip():
                line.pop()
            self._lines.append(line)

    def show(self) -> None:
        from rich.console import Console
        from rich.segment import Segment, Segments
        from rich.style import Style

        segments = []
        for line in self._lines:
            for cell in line:
                style = None if isinstance(cell, str) else Style.parse(cell[1])
                segments.append(Segment(printable(_text(cell)), style))
            segments.append(Segment.line())
        console = Console(highlight=False)
        with console.capture() as capture:  # rich turns a broken pipe into an exit of its own
            console.print(Segments(segments), crop=False, end="")
        sys.stdout.write(capture.get())
        sys.stdout.flush()
        self._lines.clear()


def show_space(page: Page, file_system: dict[str, Any]) -> None:
    """One line on how much of a file system is free, given as in the commands' JSON."""
    free, total = file_system["free_bytes"], file_system["total_bytes"]
    page.line(
        f"  {file_system['kind']} {file_system['mount_point']}: ",
        (f"{human_bytes(free)} of {human_bytes(total)} free", "bold red" if free < 0.05 * total else ""),
    )


def _text(cell: Cell) -> str:
    return cell if isinstance(cell, str) else cell[0]


def _escaped(cell: Cell) -> Cell:
    return printable(cell) if isinstance(cell, str) else (printable(cell[0]), cell[1])


def shortened(text: str, length_max: int) -> str:
    return text if len(text) <= length_max else text[: length_max - 3] + "..."


def first_few(texts: Sequence[str]) -> str:
    """The first three of them, and how many more there are."""
    more = f" and {len(texts) - 3:,} more" if len(texts) > 3 else ""
    return ", ".join(shortened(text, 100) for text in texts[:3]) + more


def plural(count: int, noun: str) -> str:
    """``1 object``, ``1,020 objects``; entry -> entries."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun[:-1]}ies" if noun.endswith("ry") else f"{count:,} {noun}s"


def local_time(unix_s: float) -> str:
    try:
        return datetime.fromtimestamp(unix_s).astimezone().isoformat(" ", "seconds")
    except (OverflowError, ValueError, OSError):
        return "at an impossible time"  # a manifest can say anything


def age(unix_s: float) -> str:
    """How long ago that was: ``12 s``, ``3 min``, ``5 h 20 min``, ``3 d 4 h``."""
    seconds = max(int(time.time() - unix_s), 0)
    if seconds < 120:
        return f"{seconds} s"
    if seconds < 7200:
        return f"{seconds // 60} min"
    if seconds < 172_800:
        return f"{seconds // 3600} h {seconds // 60 % 60} min"
    return f"{seconds // 86_400} d {seconds // 3600 % 24} h"
