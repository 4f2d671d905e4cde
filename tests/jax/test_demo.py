"""The JAX demo, cut short: it passes, says so, and leaves nothing behind."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import SHARED_MEMORY

DEMO = Path(__file__).parents[2] / "examples" / "train_flax.py"
DEMO_S = 280
SHORT = ["--steps", "8", "--save-every", "2", "--kills", "1"]


def start(*arguments: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    return subprocess.Popen(
        [sys.executable, DEMO, *SHORT, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def left_by(demo: subprocess.Popen[str]) -> list[str]:
    """Folders of the demo in memory, and processes that have its name in their environment."""
    name = f"flashpoint-demo-{demo.pid}"
    found = [entry for entry in os.listdir(SHARED_MEMORY) if entry == name]
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"/{name}/".encode() in Path(entry, "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes().decode())
        except OSError:
            pass
    return found
