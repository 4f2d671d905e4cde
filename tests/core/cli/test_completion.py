import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashpoint.cli import completion, discovery
from tests.core.cli.roots import REPOSITORY, saved

MAIN = "from flashpoint import cli; import sys; sys.argv[0] = 'flashpoint'; sys.exit(cli.main())"


def completed(line):
    """What a shell would offer after ``line``: the line of argcomplete's own protocol with the shells."""
    env = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": "/dev/stdout",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "COMP_TYPE": "9",
    }
    result = subprocess.run([sys.executable, "-c", MAIN], env=env, capture_output=True, text=True, timeout=60)
    return [word.strip() for word in result.stdout.split("\n") if word.strip()]


def test_a_shell_is_offered_commands_options_job_roots_and_steps(job_root):
    for step in (5, 10):
        saved(job_root, step=step)
    assert {"ls", "status", "doctor"} <= set(completed("flashpoint "))
    assert completed("flashpoint stat") == ["status"]
    assert completed("flashpoint drain --no-r") == ["--no-read-back"]
    assert job_root in completed(f"flashpoint status {job_root[:-2]}")
    assert set(completed(f"flashpoint rm {job_root} ")) >= {"5", "10"}
    assert completed(f"flashpoint drain {job_root} --step 1") == ["10"]
    assert f"{job_root}/step-5_ckpt" in completed(f"flashpoint inspect {job_root}/step-5")


def test_only_what_is_this_users_is_offered(job_root, monkeypatch):
    saved(job_root)
    monkeypatch.setattr(discovery, "memory_places", lambda: [str(Path(job_root).parent)])
    assert completion._job_roots("") == [job_root]
    assert completion._containers("") == [f"{job_root}/step-100_ckpt"]
    assert completion._either("") == [f"{job_root}/step-100_ckpt", job_root]


@pytest.mark.parametrize("given", [None, "/nowhere", "/proc"])
def test_steps_of_what_is_no_job_root_are_none(given):
    class Given:
        job_root = given

    assert completion._steps("", Given()) == []
