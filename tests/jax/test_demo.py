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
DEMO_S = 900  # a demo that hangs ends itself, after two minutes without a step
SHORT = ["--steps", "12", "--save-every", "2", "--kills", "0"]


def start(*arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}  # half the time to compile
    return subprocess.Popen(
        [sys.executable, DEMO, *arguments],
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


def passes(steps: int, *arguments: str) -> str:
    demo = start(*arguments)
    printed, _ = demo.communicate(timeout=DEMO_S)
    assert demo.returncode == 0, printed
    assert re.search(r"node \d is lost: its agent killed", printed)
    assert re.search(r"resumed from step \d+ \(peer memory, .*: bit-identical", printed)
    assert f"losses: {2 * steps} of {2 * steps} bit-identical" in printed
    assert re.search(rf"stock Orbax, without Flashpoint: step {steps}, .* bit-identical", printed)
    assert left_by(demo) == []
    return printed


@pytest.mark.timeout(DEMO_S + 60)
def test_a_short_demo_passes_and_leaves_nothing() -> None:
    passes(12, *SHORT)


@pytest.mark.soak
@pytest.mark.timeout(DEMO_S + 60)
def test_the_demo_passes_and_leaves_nothing() -> None:
    printed = passes(30)
    assert len(re.findall(r"resumed from step \d+ \(local memory, .*: bit-identical", printed)) == 2


def test_a_demo_that_is_ended_leaves_nothing() -> None:
    demo = start(*SHORT)
    deadline = time.monotonic() + 60
    while not any("train_flax.py" in one for one in left_by(demo)):
        assert time.monotonic() < deadline, "the demo started no training"
        time.sleep(0.05)
    demo.send_signal(signal.SIGTERM)
    printed, _ = demo.communicate(timeout=60)
    assert demo.returncode == 143, printed
    assert left_by(demo) == []
