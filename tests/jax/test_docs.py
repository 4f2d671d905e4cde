"""The code of docs/jax.md on torch and JAX runs as written, as one program."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# What the page claims of its own code.
CHECKS = """
assert state["step"] == 100 and state["embed"].sharding == rows
assert state["dense"]["kernel"].dtype == jnp.bfloat16 and state["dense"]["bias"].dtype == jnp.float32
assert state["dense"]["kernel"].astype(jnp.float32).tolist() == before[1].T.float().tolist()
assert all(torch.equal(one, other) for one, other in zip(model.state_dict().values(), before))
assert torch.equal(tensors["embed"], before[0]) and torch.equal(tensors["dense"]["bias"], before[2].float())
"""


def test_between_torch_and_jax_runs_as_written(job_root: str) -> None:
    section = (ROOT / "docs" / "jax.md").read_text().split("## Between torch and JAX")[1].split("\n## ")[0]
    saves, loads, back = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    spoil = "before = [t.clone() for t in model.state_dict().values()]\nfor t in model.parameters(): t.data.zero_()\n"
    code = "\n".join([saves, loads, spoil, back, CHECKS])
    assert "/dev/shm/job-1" in code and "/dev/shm/job-2" in code
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code.replace("/dev/shm/job-", f"{job_root}/job-")],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["(8, 4)"]
