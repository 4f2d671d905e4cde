"""Fixtures that run commands in this process."""

import json

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
