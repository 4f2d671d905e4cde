import os
import pathlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashpoint.errors import FlashpointError, InvalidIdError
from flashpoint.ids import (
    RANK_MAX,
    STEP_MAX,
    CheckpointContainerId,
    CheckpointObjectId,
    parse_container_name,
    validate_job_root,
    validate_step,
)

# ---- job roots ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_path", "root"),
    [
        ("/dev/shm/job-1", "/dev/shm/job-1"),
        ("/dev/shm/job-1/", "/dev/shm/job-1"),
        ("/dev//shm/./job-1", "/dev/shm/job-1"),
        ("//dev/shm/job-1", "/dev/shm/job-1"),  # POSIX lets exactly two slashes mean something else
        ("/dev/shm/..job", "/dev/shm/..job"),
        ("/dev/shm/job 1\n", "/dev/shm/job 1\n"),
    ],
)
def test_a_job_root_is_an_absolute_path_in_normal_form(given_path, root):
    assert validate_job_root(given_path) == root
    assert validate_job_root(pathlib.PurePosixPath(root)) == root
    assert validate_job_root(root) == root


@pytest.mark.fault(35)
@pytest.mark.parametrize(
    "path",
    ["", "job-1", "./job-1", "/dev/shm/../etc", "/..", "/dev/shm/job\0", "/", "//", "/.", b"/dev/shm/job"],
)
def test_a_relative_root_dots_nul_and_the_file_systems_root_are_refused(path):
    with pytest.raises(InvalidIdError):
        validate_job_root(path)


@pytest.mark.parametrize("path", [None, 3, 1.5, ["/dev/shm/job"]])
def test_what_is_no_path_at_all_is_refused_as_such(path):
    with pytest.raises(InvalidIdError):
        validate_job_root(path)


def test_an_id_error_is_a_flashpoint_error_and_a_value_error():
    assert issubclass(InvalidIdError, FlashpointError)
    assert issubclass(InvalidIdError, ValueError)


# ---- steps --------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 1, 9, 10, STEP_MAX, np.int64(7), np.uint8(7), np.array(7)])
def test_a_step_is_any_integer_from_zero_to_the_largest(step):
    assert validate_step(step) == int(step)
    assert type(validate_step(step)) is int


@pytest.mark.parametrize(
    "step",
    [
        -1,
        STEP_MAX + 1,
        10**30,
        True,
        False,
        np.True_,
        1.0,
        np.float32(1),
        "1",
        None,
        np.array([1, 2]),
        np.array(1.5),
    ],
)
def test_anything_else_is_no_step(step):
    with pytest.raises(InvalidIdError):
        validate_step(step)
    with pytest.raises(InvalidIdError):
        CheckpointContainerId("/dev/shm/job", step)


# ---- containers ---------------------------------------------------------------------------------


@pytest.mark.fault(35)
@pytest.mark.parametrize(
    "name",
    [
        "step-9_ckpt.bak",
        "step-09_ckpt",
        "step-00_ckpt",
        "step-+9_ckpt",
        "step--9_ckpt",
        "step- 9_ckpt",
        "step-9 _ckpt",
        "step-9_ckpt\n",
        "step-9\n_ckpt",
        " step-9_ckpt",
        "step-_ckpt",
        "step-9",
        "step-9_CKPT",
        "Step-9_ckpt",
        "step-9_ckpt_ckpt",
        "xstep-9_ckpt",
        "step-1_000_ckpt",
        "step-1e3_ckpt",
        "step-0x9_ckpt",
        "step-9.0_ckpt",
        "step-٩_ckpt",
        "step-９_ckpt",
        "step-²_ckpt",
        f"step-{STEP_MAX + 1}_ckpt",
        f"step-{10**40}_ckpt",
        "step-9_ckpt__0__unfinished",
        "",
    ],
)
def test_only_the_exact_name_is_a_container(name):
    assert parse_container_name(name) is None
    with pytest.raises(InvalidIdError):
        CheckpointContainerId.parse(f"/dev/shm/job/{name}")


@given(st.integers(0, STEP_MAX))
def test_a_container_name_reads_back_as_its_step(step):
    container = CheckpointContainerId("/dev/shm/job", step)
    assert parse_container_name(container.name) == step
    assert CheckpointContainerId.parse(container.path) == container
    assert container.path == str(container) == os.fspath(container) == f"/dev/shm/job/step-{step}_ckpt"


@given(st.text(alphabet=st.sampled_from("step-_ckp0123456789+ .\n٩"), max_size=20) | st.text(max_size=20))
def test_a_name_that_is_accepted_writes_back_as_the_same_characters(name):
    step = parse_container_name(name)
    assert step is None or CheckpointContainerId("/job", step).name == name


@pytest.mark.parametrize(
    "path", ["step-9_ckpt", "job/step-9_ckpt", "/job/../step-9_ckpt", "/step-9_ckpt", "/", ""]
)
def test_a_container_path_needs_a_sound_job_root(path):
    with pytest.raises(InvalidIdError):
        CheckpointContainerId.parse(path)


def test_job_roots_are_never_matched_by_prefix():
    one, ten = CheckpointContainerId("/x/job1", 0), CheckpointContainerId("/x/job10", 0)
    assert one != ten
    assert CheckpointContainerId.parse("/x/job10/step-0_ckpt").job_root == "/x/job10"
    assert CheckpointContainerId.parse("/x/job1/0/step-0_ckpt").job_root == "/x/job1/0"


def test_containers_are_ordered_by_step_as_a_number():
    steps = [100, 9, 10, 1, 0, 99]
    ordered = sorted(CheckpointContainerId("/job", step) for step in steps)
    assert [container.step for container in ordered] == [0, 1, 9, 10, 99, 100]


def test_equal_containers_are_one_key():
    assert len({CheckpointContainerId("/job/", 3), CheckpointContainerId("/job", np.int32(3))}) == 1


# ---- objects ------------------------------------------------------------------------------------


@given(st.integers(0, RANK_MAX), st.integers(0, 999_999))
def test_an_object_name_reads_back_as_its_rank_and_index(rank, index):
    obj = CheckpointObjectId(rank, index)
    assert CheckpointObjectId.parse(obj.name) == obj
    assert len(obj.name) <= 255


@pytest.mark.fault(35)
@pytest.mark.parametrize(
    "name",
    [
        "rank0-0.safetensors",
        "rank0003-0.safetensors",
        "rank000003-0.safetensors",  # six digits where five do
        "rank00003-00.safetensors",
        "rank00003-01.safetensors",
        "rank00003-1000000.safetensors",
        "rank00003.safetensors",
        "rank00003-0.safetensors\n",
        "rank00003-0.safetensors.tmp",
        "rank0000٣-0.safetensors",
        "rank2147483648-0.safetensors",
        "rank9999999999-0.safetensors",
        "rank-0003-0.safetensors",
        "../rank00003-0.safetensors",
        "rank00003-0_safetensors",
        "",
    ],
)
def test_only_the_exact_name_is_an_object(name):
    with pytest.raises(InvalidIdError):
        CheckpointObjectId.parse(name)


def test_ranks_beyond_five_digits_have_names_too():
    assert CheckpointObjectId(123_456, 2).name == "rank123456-2.safetensors"
    assert CheckpointObjectId.parse("rank123456-2.safetensors") == CheckpointObjectId(123_456, 2)


@pytest.mark.parametrize(("rank", "index"), [(-1, 0), (RANK_MAX + 1, 0), (0, -1), (0, 1_000_000)])
def test_ranks_and_indexes_out_of_range_are_refused(rank, index):
    with pytest.raises(InvalidIdError):
        CheckpointObjectId(rank, index)


def test_objects_are_ordered_by_rank_then_index():
    ordered = sorted([CheckpointObjectId(10, 0), CheckpointObjectId(9, 1), CheckpointObjectId(9, 0)])
    assert [obj.name for obj in ordered] == [
        "rank00009-0.safetensors",
        "rank00009-1.safetensors",
        "rank00010-0.safetensors",
    ]
