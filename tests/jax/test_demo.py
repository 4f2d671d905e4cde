"""The JAX demo, cut short: it passes, says so, and leaves nothing behind."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.conftest import SHARED_MEMORY

DEMO = Path(__file__).parents[2] / "examples" / "train_flax.py"
DEMO_S = 280
SHORT = ["--steps", "8", "--save-every", "2", "--kills", "1"]


def start(*arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}  # half the time to compile
    return subprocess.Popen(
        [sys.executable, DEMO, *SHORT, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def left_by(demo: subprocess.Popen[str]) -> list[str]:
    """Folders of the demo in memory, and processes that it started."""
    name = f"flashpoint-demo-{demo.pid}"
    found = [entry for entry in os.listdir(SHARED_MEMORY) if entry == name]
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"/{name}/".encode() in Path(entry, "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes().decode())
        except OSError:
            pass
    return found


def test_the_demo_passes_and_leaves_nothing() -> None:
    demo = start()
    printed, _ = demo.communicate(timeout=DEMO_S)
    assert demo.returncode == 0, printed
    assert re.search(r"resumed from step \d+ \(local, ", printed)
    assert "losses: 16 of 16 bit-identical" in printed
    assert re.search(r"stock Orbax, without Flashpoint: step 8, .* bit-identical", printed)
    assert left_by(demo) == []


def test_a_demo_that_is_ended_leaves_nothing() -> None:
    demo = start()
    deadline = time.monotonic() + 60
    while not any("train_flax.py" in one for one in left_by(demo)):
        assert time.monotonic() < deadline, "the demo started no training"
        time.sleep(0.05)
    demo.send_signal(signal.SIGTERM)
    printed, _ = demo.communicate(timeout=60)
    assert demo.returncode == 143, printed
    assert left_by(demo) == []
