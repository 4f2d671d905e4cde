"""The text that the demos' models read: real, and on every machine."""

import sysconfig
from pathlib import Path


def standard_library(limit: int = 4_000_000) -> bytearray:
    """The first megabytes of Python's own source."""
    folder, text = Path(sysconfig.get_path("stdlib")), bytearray()
    for path in sorted(folder.rglob("*.py")):
        if not {"site-packages", "dist-packages", "test", "tests"} & set(path.relative_to(folder).parts):
            text += path.read_bytes()
        if len(text) >= limit:
            break
    return text[:limit]
