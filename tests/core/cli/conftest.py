"""Fixtures that run commands in this process."""

import json
import subprocess

import pytest

from flashpoint import cli


@pytest.fixture
def run(capsys):
    """Run a command in this process; returns (exit code, stdout, stderr)."""

    def run(*args):
        try:
            code = cli.main([str(arg) for arg in args])
        except SystemExit as exit:
            code = exit.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def run_json(run):
    def run_json(*args):
        code, out, _ = run(*args, "--json")
        return code, json.loads(out)

    return run_json


@pytest.fixture
def mount_tmpfs(tmp_path):
    """Mount a tmpfs with these options; its path. All go away afterwards, whatever happened."""
    paths = []

    def mount(options):
        path = tmp_path / f"tmpfs-{len(paths)}"
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "none", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
        paths.append(path)
        return str(path)

    try:
        yield mount
    finally:
        for path in paths:
            subprocess.run(["umount", "-l", str(path)], check=True)
