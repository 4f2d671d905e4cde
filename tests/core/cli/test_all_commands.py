import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from flashpoint import cli
from flashpoint.cli import ls
from flashpoint.cli.output import Page
from tests.core.cli.roots import REPOSITORY, crashed, flashpoint, saved

NO_CHECKPOINT = " is no checkpoint: a container is a folder named step-<n>_ckpt"


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["ls", "{root}/nowhere"], "{root}/nowhere: No such file or directory"),
        (["ls", "{root}/file"], "{root}/file: Not a directory"),
        (["ls", "{root}/step-9_ckpt"], "{root}/step-9_ckpt is one version: `flashpoint inspect` shows it"),
        (["inspect", "{root}/nowhere"], "{root}/nowhere: there is no such folder"),
        (["inspect", "{root}/nowhere/step-1_ckpt"], "{root}/nowhere: No such file or directory"),
        (["inspect", "{root}/step-7_ckpt"], "{root}/step-7_ckpt: there is no such version"),
        (["inspect", "{root}/file"], "{root}/file" + NO_CHECKPOINT),
        (
            ["inspect", "{root}"],
            "{root} is a job root, not a container; its newest version is {root}/step-9_ckpt",
        ),
        (["inspect", "{root}/step-9_ckpt", "--rank", "1"], "step 9 has 1 rank: there is no rank 1"),
        (["verify", "{root}/nowhere"], "{root}/nowhere: there is no such folder"),
        (["verify", "/"], "/" + NO_CHECKPOINT),
        (["verify", "{root}/file"], "{root}/file" + NO_CHECKPOINT),
    ],
)
def test_what_is_not_there_is_one_line_on_stderr_and_exit_code_2(job_root, run, args, problem):
    saved(job_root, step=9)
    Path(job_root, "file").touch()
    code, out, err = run(*(arg.format(root=job_root) for arg in args))
    assert (code, out) == (2, "")
    assert err == f"flashpoint {args[0]}: {problem.format(root=job_root)}\n"


@pytest.mark.parametrize("args", [[], ["no-command"], ["inspect"], ["verify"], ["ls", "--no-option"]])
def test_wrong_usage_exits_with_2(run, args):
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert err.startswith("usage: flashpoint")


def test_options_may_stand_anywhere(job_root, run):
    container = saved(job_root)
    for args in (["--json", container, "ids"], [container, "--json", "ids"], [container, "ids", "--json"]):
        assert json.loads(run("inspect", *args)[1])["statistics"]["max"] == 99


def test_debug_shows_the_traceback_of_an_error(job_root, run):
    assert "Traceback" not in run("ls", f"{job_root}/nowhere")[2]
    code, _, err = run("ls", f"{job_root}/nowhere", "--debug")
    assert code == 2
    assert err.startswith("Traceback") and "FileNotFoundError" in err


def test_a_bug_is_never_taken_for_a_corrupt_checkpoint(run, monkeypatch):
    monkeypatch.setattr(ls, "run", lambda args: 1 // 0)
    code, _, err = run("ls")
    assert code == 70
    assert "ZeroDivisionError" in err


def test_a_reader_that_goes_away_is_no_error(job_root):
    container = saved(job_root, {f"w{i}": np.zeros(1) for i in range(5000)})
    for option in ("--all", "--json"):
        command = [sys.executable, "-m", "flashpoint", "inspect", container, option]
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
        process.stderr.close()
        assert process.wait(timeout=60) == 0


# What makes each command print all the JSON that it can: a new command gets a line here.
EXAMPLES = {
    "ls": ["{root}"],
    "status": ["{root}"],
    "inspect": ["{container}", "ids"],
    "verify": ["{root}"],
    "drain": ["{root}", "--to", "{tmp}"],
    "rm": ["{root}", "101", "--yes"],
    "diff": ["{container}", "100", "--all", "--name", "ids"],
    "export": ["{container}", "{tmp}/out", "--format", "safetensors"],
    "plan": ["--params", "1e9", "--nodes", "4", "--step", "1s"],
    "bench": ["{root}", "--bytes", "1MiB", "--repeats", "1"],
    "doctor": ["{root}", "--quick"],
    "mount": ["{tmp}", "--size", "1G"],
    "agent": ["{root}", "--stop"],
    "simulate": ["--seeds", "2", "--nodes", "2", "--jobs", "1"],
}


def keys_of(value):
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from keys_of(item)
    elif isinstance(value, list):
        for item in value:
            yield from keys_of(item)


@pytest.mark.parametrize("name", [module.NAME for module in cli.COMMANDS])
def test_every_command_prints_json_and_nothing_else_and_its_help_documents_every_key(
    job_root, run, tmp_path, name
):
    container = saved(job_root)
    crashed(job_root, 101)
    args = [arg.format(root=job_root, container=container, tmp=tmp_path) for arg in EXAMPLES[name]]
    code, out, err = run(name, *args, "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert out.count("\n") == 1
    help_text = run(name, "--help")[1]
    documented = set(re.findall(r"\w+", help_text))
    assert set(keys_of(report)) <= documented


def test_each_command_says_its_exit_codes(run):
    for args in ([], *([module.NAME] for module in cli.COMMANDS)):
        code, out, _ = run(*args, "--help")
        assert code == 0
        assert "exit codes:" in out


def test_paths_and_terminals_without_utf8_are_no_error(job_root):
    root = os.fsencode(job_root) + b"/\xff\n"
    saved(os.fsdecode(root), {"日本": np.zeros(1)})
    result = flashpoint("ls", os.fsdecode(root), "--json")
    assert json.loads(result.stdout)["job_roots"][0]["path"] == os.fsdecode(root)
    result = flashpoint("inspect", os.fsdecode(root + b"/step-100_ckpt"), env={"PYTHONIOENCODING": "ascii"})
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith(f"{job_root}/\\udcff\\n/step-100_ckpt  complete\n")
    assert "\\u65e5\\u672c\n" in result.stdout


def test_a_terminal_gets_colours_and_a_pipe_gets_none(job_root):
    container = saved(job_root)
    assert "\x1b[32mcomplete\x1b[0m" in flashpoint("inspect", container, env={"FORCE_COLOR": "1"}).stdout
    assert "\x1b" not in flashpoint("inspect", container).stdout


def test_columns_line_up_where_characters_are_wide(capsys):
    page = Page()
    page.table(["name", ">size", "x"], [["日本", "1", "a"], ["b", "22", ""]])
    page.show()
    assert capsys.readouterr().out == "  name  size  x\n  日本     1  a\n  b       22\n"


def test_nothing_heavy_is_imported_before_a_command_runs():
    code = "import sys, flashpoint.cli; print({'rich', 'torch', 'jax'} & set(sys.modules))"
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    assert subprocess.check_output([sys.executable, "-c", code], text=True, env=env) == "set()\n"
    assert flashpoint("--version").stdout.startswith("flashpoint 0.")
