import builtins
import math

import pytest

from flashpoint.cli.arguments import duration, human_seconds, rate, size
from flashpoint.planning import daly_interval, young_interval
from tests.core.cli.roots import flashpoint

JOB = ["--params", "7e9", "--ranks", "64", "--nodes", "8", "--step", "2s"]
RATES = ["--copy-rate", "10GiB/s", "--seal-rate", "20GiB"]


def test_plan_is_a_table_of_policies_that_names_what_it_assumed():
    result = flashpoint("plan", *JOB, *RATES, "--mtbf-node", "5000h")
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == "104.3 GiB a version on 8 nodes of 8 ranks: 13.0 GiB a node, 1.6 GiB a rank"
    assert "a node lost every 26 d" in lines[1]  # 5000 h / 8
    assert any("assumed: --bytes-per-param, --mtbf-process" in line for line in lines)
    assert not any("measured" in line for line in lines)
    policies = [
        "storage, blocking",
        "storage, in the background",
        *(f"memory, copies={n}" for n in (0, 1, 2)),
    ]
    assert [line.split("%  ")[1] for line in lines[-5:]] == policies


def test_plan_as_json_has_the_formulas_results(run_json):
    code, report = run_json("plan", *JOB, *RATES, "--mtbf-node", "5000h", "--mtbf-process", "never")
    assert code == 0
    job, copied = report["job"], report["policies"][3]
    assert (job["state_bytes"], job["process_mtbf_s"]) == (7e9 * 16, None)
    assert job["mtbf_s"] == pytest.approx(5000 * 3600 / 8)
    assert copied["name"] == "memory, copies=1"
    assert copied["blocking_s"] == pytest.approx(7e9 * 16 / 8 / (10 << 30))
    assert copied["young_s"] == pytest.approx(young_interval(copied["blocking_s"], job["mtbf_s"]))
    assert copied["daly_s"] == pytest.approx(daly_interval(copied["blocking_s"], job["mtbf_s"]))
    assert copied["memory_bytes"] == pytest.approx((3 + 2) * 7e9 * 16 / 8)
    assert "--mtbf-node" not in report["assumed"] and "--step" not in report["assumed"]


def test_rates_that_are_not_given_are_measured_here(run_json):
    _, report = run_json("plan", *JOB)
    assert report["measured"] == ["--copy-rate", "--seal-rate"]
    assert 1 << 20 < report["rates"]["copy"] < 1 << 45
    assert 1 << 20 < report["rates"]["seal"] < 1 << 45


def test_storage_is_shared_by_all_nodes(run_json):
    for nodes, each in (("8", 256 << 20), ("256", 100 << 20)):
        args = ["--params", "7e9", "--nodes", nodes, "--step", "2s", *RATES]
        assert run_json("plan", *args, "--storage-total", "25GiB/s")[1]["rates"]["storage"] == each


def test_a_job_without_failures_is_planned_too(run_json, run):
    never = ["--mtbf-node", "never", "--mtbf-process", "never"]
    _, report = run_json("plan", *JOB, *RATES, *never)
    assert (report["job"]["mtbf_s"], report["policies"][2]["young_s"]) == (None, None)
    assert "never" in run("plan", *JOB, *RATES, *never)[1]


def test_an_interval_that_is_given_is_taken(run_json):
    _, report = run_json("plan", *JOB, *RATES, "--every", "50")
    assert {(one["steps"], one["interval_s"]) for one in report["policies"]} == {(50, 100.0)}


def test_copies_are_only_planned_where_there_are_nodes_for_them(run_json):
    args = ["--state-bytes", "80GiB", "--nodes", "2", "--step", "500ms", *RATES]
    names = [one["name"] for one in run_json("plan", *args)[1]["policies"]]
    assert names[-2:] == ["memory, copies=0", "memory, copies=1"]


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (
            ["--params", "7e9", "--ranks", "9", "--nodes", "8", "--step", "2s"],
            "9 ranks cannot be spread evenly over 8 nodes",
        ),
        (["--params", "0", "--nodes", "8", "--step", "2s"], "--params must be more than nothing"),
        (["--params", "nan", "--nodes", "8", "--step", "2s"], "--params must be more than nothing"),
        (["--params", "7e9", "--nodes", "0", "--step", "2s"], "--nodes must be more than nothing"),
        (["--params", "7e9", "--nodes", "8", "--step", "never"], "--step must be finite"),
        (["--params", "7e9", "--nodes", "8", "--step", "2 parsecs"], "'2 parsecs' is not a time"),
        (
            ["--params", "7e9", "--nodes", "8", "--step", "2s", "--network-rate", "fast"],
            "'fast' is not a size",
        ),
        (["--nodes", "8", "--step", "2s"], "one of the arguments --params --state-bytes is required"),
    ],
)
def test_what_cannot_be_planned_exits_with_2(run, args, problem):
    code, out, err = run("plan", *args)
    assert (code, out) == (2, "")
    assert problem in err


def test_a_plot_is_a_picture(run, tmp_path):
    path = tmp_path / "plan.png"
    assert run("plan", *JOB, *RATES, "--plot", path)[0] == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    code, _, err = run("plan", *JOB, *RATES, "--plot", tmp_path / "plan.odt")
    assert code == 2
    assert "its name must end with one of" in err and ".png" in err


def test_a_plot_without_matplotlib_says_what_to_install(run, monkeypatch, tmp_path):
    real = builtins.__import__

    def absent(name, *args, **kwargs):
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    code, _, err = run("plan", *JOB, *RATES, "--plot", tmp_path / "plan.png")
    assert code == 2
    assert err == "flashpoint plan: --plot needs matplotlib: pip install matplotlib\n"
    assert not (tmp_path / "plan.png").exists()


# ---- sizes, rates and times ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("2", 2), ("90 s", 90), ("30min", 1800), ("5000h", 18e6), ("3d", 259_200), ("1e3s", 1000),
     ("never", math.inf)],
)  # fmt: skip
def test_times_as_people_write_them(text, seconds):
    assert duration(text) == pytest.approx(seconds)


def test_sizes_and_rates_as_people_write_them():
    assert size("1.5GiB") == 3 << 29
    assert rate("256MiB/s") == rate("256MiB") == 256 << 20


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0123, "12.3 ms"), (1.5, "1.5 s"), (119, "119 s"), (1800, "30 min"), (18_000, "5 h"), (864_000, "10 d"),
     (math.inf, "never")],
)  # fmt: skip
def test_times_as_people_read_them(seconds, text):
    assert human_seconds(seconds) == text
