"""The README's code runs as written: first as a new job, then again, as after a crash."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def blocks(heading: str, job_root: str) -> str:
    """The Python blocks below a heading as one program, with the job roots of this test in place of its own."""
    text = (ROOT / "README.md").read_text()
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    code = "\n".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL))
    assert "/dev/shm/job-" in code
    return code.replace("/dev/shm/job-", f"{job_root}/job-")


@pytest.fixture
def program(job_root: str) -> str:
    return blocks("First page", job_root)


@pytest.fixture
def jax_program(job_root: str) -> str:
    pytest.importorskip("orbax.checkpoint")
    return blocks("First page, for JAX", job_root)


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_readme_runs_as_written(program: str) -> None:
    assert run(program).splitlines() == ["[30]", "(1000, 1000)"]


def test_killed_at_step_25_it_goes_on_from_step_20(program: str) -> None:
    first = program.split("import torch.distributed.checkpoint")[0]
    dies = first.replace(
        "        if step % 10 == 0:",
        "        if step == 25:\n            import os; os.abort()\n        if step % 10 == 0:",
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", dies], timeout=120, cwd=ROOT, check=False)
    tells = first.replace(
        "    fp.recover(state)", "    print(fp.recover(state).step, len(optimizer.state_dict()['state']))"
    )
    assert run(tells).splitlines() == ["20 2", "[30]"]


def test_the_jax_page_runs_as_written(jax_program: str) -> None:
    assert run(jax_program) == "[30]\n"


def test_killed_at_step_25_the_jax_page_goes_on_from_step_20(jax_program: str) -> None:
    every_tenth = "        if step % 10 == 0:"
    stop = "        if step == 25:\n            manager.wait_until_finished(); import os; os.abort()\n"
    dies = jax_program.replace(every_tenth, stop + every_tenth)
    assert dies != jax_program
    subprocess.run([sys.executable, "-W", "ignore", "-c", dies], timeout=120, cwd=ROOT, check=False)
    tells = jax_program.replace("    for step in range", "    print(state['step'])\n    for step in range")
    assert run(tells).splitlines() == ["20", "[30]"]
