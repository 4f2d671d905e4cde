"""docs/cli.md is about the commands that there are, as they are."""

import re
import shlex
from pathlib import Path

import pytest

from flashpoint import cli
from flashpoint.cli import exit_codes
from tests.core.cli.roots import REPOSITORY, rows, saved

PAGE = Path(REPOSITORY, "docs", "cli.md").read_text()
TRANSCRIPTS = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [shlex.split(line)[2:] for line in re.findall(r"^\$ flashpoint .*$", PAGE, re.MULTILINE)]


@pytest.mark.parametrize("name", [module.NAME for module in cli.COMMANDS])
def test_every_command_has_a_section_with_a_transcript(name):
    section = PAGE.split(f"\n## {name}\n")[1].split("\n## ")[0]
    assert f"$ flashpoint {name} " in section


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_line_that_is_shown_is_one_that_the_command_takes(command):
    cli._parser().parse_args(command)


def test_the_exit_codes_are_those_of_the_code():
    table = re.findall(r"^\| ([0-9]+) \| (.*) \|$", PAGE, re.MULTILINE)
    assert table == [(str(code), meaning) for code, meaning in exit_codes.MEANINGS.items()]
    for transcript in TRANSCRIPTS:
        for code in re.findall(r"\$ echo \$\?\n([0-9]+)", transcript):
            assert int(code) in exit_codes.MEANINGS


@pytest.mark.parametrize("command", ["ls", "status"])
def test_tables_have_the_columns_that_are_shown(job_root, run, command):
    saved(job_root)
    header = next(row for row in rows(run(command, job_root)[1]) if row.startswith("step "))
    shown = [row for transcript in TRANSCRIPTS for row in rows(transcript)]
    assert header in shown


def test_doctor_shows_every_check_that_it_makes(job_root, run_json):
    saved(job_root)
    shown = next(one for one in TRANSCRIPTS if one.startswith("$ flashpoint doctor"))
    _, report = run_json("doctor", job_root, "--quick")
    for finding in report["findings"]:
        assert re.search(rf"^  (ok  |warn|bad )  {finding['check']} ", shown, re.MULTILINE), finding["check"]
