"""Stock `dcp.save` and `dcp.load` with our writer and reader."""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import flashpoint
import flashpoint_torch as fpt
from tests.torch.states import blank, differences, same
from tests.torch.workers import Workers

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

Save = Callable[[dict[str, Any], str], None]


def save(state: dict[str, Any], path: str, **options: Any) -> Metadata:
    return dcp.save(state, checkpoint_id=path, storage_writer=fpt.FlashpointWriter(), **options)


def load(state: dict[str, Any], path: str, **options: Any) -> None:
    dcp.load(state, checkpoint_id=path, storage_reader=fpt.FlashpointReader(), **options)


class Counter:
    """A Stateful that holds a tensor, a number, and how often it was loaded."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.tensor = torch.full((3,), float(number))
        self.loads = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "tensor": self.tensor,
            "rows": [self.tensor * 2, {"deep": self.number}],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]
        self.tensor = state["tensor"]
        self.loads += 1
        assert state["rows"][1]["deep"] == self.number
        assert torch.equal(state["rows"][0], self.tensor * 2)


def sharded_state(add: float = 0.0) -> dict[str, Any]:
    """DTensors sharded and replicated, a plain tensor and a value that differ by rank, and one that do not."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(40.0).view(5, 8) + add
    return {
        "rows": distribute_tensor(whole, mesh, [Shard(0)]),
        "columns": distribute_tensor(whole * 2, mesh, [Shard(1)]),
        "replicated": distribute_tensor(whole * 3, mesh, [Replicate()]),
        "nested": {"same": whole[0] * 4, "items": [whole[1] * 5, "text"]},
        "step": 7 + int(add),
    }


# ---- on several ranks -------------------------------------------------------------------------------


def save_and_load(path: str, collectives: bool) -> None:
    metadata = save(sharded_state(), path, use_collectives=collectives)
    assert set(metadata.state_dict_metadata) >= {"rows", "columns", "nested.same", "nested.items.0", "step"}
    target = blank_sharded()
    held = {name: target[name].to_local().data_ptr() for name in ("rows", "columns", "replicated")}
    load(target, path)
    assert differences(target, sharded_state()) == []
    assert held == {name: target[name].to_local().data_ptr() for name in held}  # filled where they were


def blank_sharded() -> dict[str, Any]:
    state = sharded_state()
    for name in ("rows", "columns", "replicated"):
        state[name].to_local().zero_()
    return state | {"nested": blank(state["nested"]), "step": None}


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("collectives", [True, False])
def test_save_and_load(workers: Workers, job_root: str, world_size: int, collectives: bool) -> None:
    workers.run(world_size, save_and_load, f"{job_root}/step-1_ckpt", collectives)


def state_by_rank(path: str) -> None:
    rank = dist.get_rank()
    save({"generator": torch.full((3,), float(rank)), "name": f"rank {rank}"}, path, use_collectives=False)
    target = {"generator": torch.zeros(3), "name": None}
    load(target, path)
    assert same(target, {"generator": torch.full((3,), float(rank)), "name": f"rank {rank}"})


def test_without_collectives_each_rank_gets_its_own_back(workers: Workers, job_root: str) -> None:
    workers.run(2, state_by_rank, f"{job_root}/step-1_ckpt")


def stateful(path: str) -> None:
    save({"counter": Counter(5), "model": torch.nn.Linear(2, 2)}, path)
    counter, model = Counter(0), torch.nn.Linear(2, 2)
    pointer = model.weight.data_ptr()
    load({"counter": counter, "model": model}, path)
    assert (counter.number, counter.loads) == (5, 1)
    assert torch.equal(counter.tensor, torch.full((3,), 5.0))
    assert model.weight.data_ptr() == pointer


def test_stateful_objects(workers: Workers, job_root: str) -> None:
    workers.run(2, stateful, f"{job_root}/step-1_ckpt")


def many_saves(job_root: str, caching: bool, reused: bool) -> None:
    # A planner that caches sends no plan again that has not changed, and gives out the old one.
    SavePlanner._cached_save_plan.clear()
    for cache in ("_cached_all_plans", "_cached_global_plan", "_cached_metadata", "_cached_final_save_plan"):
        getattr(SavePlanner, cache).clear()
    writer = fpt.FlashpointWriter()
    for step in range(1, 6):
        if not reused:
            writer = fpt.FlashpointWriter()
        path = f"{job_root}/step-{step}_ckpt"
        planner = DefaultSavePlanner(enable_plan_caching=caching)
        dcp.save(sharded_state(float(step)), checkpoint_id=path, storage_writer=writer, planner=planner)
    for step in range(1, 6):
        target = blank_sharded()
        load(target, f"{job_root}/step-{step}_ckpt")
        assert differences(target, sharded_state(float(step))) == []


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("reused", [False, True])
def test_many_saves(workers: Workers, job_root: str, caching: bool, reused: bool) -> None:
    workers.run(2, many_saves, job_root, caching, reused)


def one_writer_in_two_job_roots(job_root: str) -> None:
    writer = fpt.FlashpointWriter()
    for step in range(1, 4):
        for root in ("a", "b"):
            path = f"{job_root}/{root}/step-{step}_ckpt"
            dcp.save(
                {"w": torch.full((3,), float(step)), "root": root}, checkpoint_id=path, storage_writer=writer
            )
    for root in ("a", "b"):
        target = {"w": torch.zeros(3), "root": ""}
        load(target, f"{job_root}/{root}/step-3_ckpt")
        assert same(target, {"w": torch.full((3,), 3.0), "root": root})


def test_one_writer_saves_into_two_job_roots(workers: Workers, job_root: str) -> None:
    workers.run(2, one_writer_in_two_job_roots, job_root)


def keys_in_the_store(job_root: str, session: bool) -> list[int]:
    store = dist.distributed_c10d._get_default_store()
    counts = []
    with fpt.init(job_root) as fp:
        for step in range(1, 8):
            writer = fp.writer() if session else fpt.FlashpointWriter()
            dcp.save(sharded_state(float(step)), checkpoint_id=fp.path(step), storage_writer=writer)
            dist.barrier()
            counts.append(sum("flashpoint" in key for key in store.list_keys()))
            dist.barrier()
    return counts


@pytest.mark.parametrize("session", [True, False])
def test_the_jobs_store_does_not_fill_up_with_saves(workers: Workers, job_root: str, session: bool) -> None:
    counts = workers.run(2, keys_in_the_store, job_root, session)[0]
    assert counts[-1] == counts[2]


def groups(job_root: str) -> None:
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = pairs[rank // 2]
    root = f"{job_root}/{rank // 2}"
    for step in (1, 2, 3):
        state = {"w": torch.full((3,), float(step + 10 * (rank // 2))), f"of {rank % 2}": rank}
        save(state, f"{root}/step-{step}_ckpt", process_group=group)
    for step in (1, 2, 3):
        target = {"w": torch.zeros(3), f"of {rank % 2}": None}
        load(target, f"{root}/step-{step}_ckpt", process_group=group)
        assert torch.equal(target["w"], torch.full((3,), float(step + 10 * (rank // 2))))
        assert target[f"of {rank % 2}"] == rank


def test_two_process_groups_save_at_the_same_time(workers: Workers, job_root: str) -> None:
    workers.run(4, groups, job_root)


def every_rank_for_itself(job_root: str) -> None:
    rank = dist.get_rank()
    path = f"{job_root}/{rank}/step-1_ckpt"
    save({"rank": rank, "w": torch.full((3,), float(rank))}, path, no_dist=True)
    target = {"rank": -1, "w": torch.zeros(3)}
    load(target, path, no_dist=True)
    assert same(target, {"rank": rank, "w": torch.full((3,), float(rank))})
    state = {"rank": rank, "w": torch.full((3,), float(rank + 5))}
    path = f"{job_root}/{rank}/step-2_ckpt"
    dcp.async_save(state, checkpoint_id=path, storage_writer=fpt.FlashpointWriter(path), no_dist=True).result(
        60
    )
    load(target, path, no_dist=True)
    assert same(target, state)


def test_no_dist(workers: Workers, job_root: str) -> None:
    workers.run(2, every_rank_for_itself, job_root)


def exists_on_two_ranks(path: str) -> str:
    save({"w": torch.zeros(3)}, path)
    with pytest.raises(CheckpointException) as failure:
        save({"w": torch.ones(3)}, path)
    target = {"w": torch.full((3,), 9.0)}
    load(target, path)
    assert torch.equal(target["w"], torch.zeros(3))
    writer = fpt.FlashpointWriter(overwrite=True)
    dcp.save({"w": torch.ones(3)}, checkpoint_id=path, storage_writer=writer)
    load(target, path)
    assert torch.equal(target["w"], torch.ones(3))
    return str(failure.value)


def test_a_version_is_replaced_only_where_that_is_asked_for(workers: Workers, job_root: str) -> None:
    texts = workers.run(2, exists_on_two_ranks, f"{job_root}/step-3_ckpt")
    assert all("step 3 is complete already" in text and "overwrite=True" in text for text in texts)


# ---- planners of one's own --------------------------------------------------------------------------


class HalfPlanner(DefaultSavePlanner):
    """Stores tensors in half precision, under other names, and leaves some out."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        kept = {f"half.{name}": value for name, value in state_dict.items() if not name.startswith("no ")}
        super().set_up_planner(kept, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        return dataclasses.replace(plan, items=[self._halved(item) for item in plan.items])

    def _halved(self, item: WriteItem) -> WriteItem:
        if item.tensor_data is None:
            return item
        properties = dataclasses.replace(item.tensor_data.properties, dtype=torch.float16)
        return dataclasses.replace(
            item, tensor_data=dataclasses.replace(item.tensor_data, properties=properties)
        )

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if isinstance(object, torch.Tensor):
            return object.half()
        return super().transform_object(write_item, object)


class PickyPlanner(DefaultSavePlanner):
    """Leaves out everything but what begins with "keep"."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [item for item in plan.items if item.index.fqn.startswith("keep")]
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan


def planned_by_hand(
    how: str, fp: fpt.Flashpoint, state: dict[str, Any], planner: SavePlanner, step: int
) -> None:
    if how == "session":
        assert fp.save(state, step, planner=planner).error is None
    elif how == "save":
        dcp.save(state, checkpoint_id=fp.path(step), storage_writer=fp.writer(), planner=planner)
    else:
        future = dcp.async_save(
            state, checkpoint_id=fp.path(step), storage_writer=fp.writer(), planner=planner
        )
        future.result(60)


def half_precision(job_root: str, how: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    with fpt.init(job_root, keep=0) as fp:
        sharded = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)])
        state = {"a": torch.arange(4.0), "s": sharded, "n": 3, "no b": torch.ones(2)}
        planned_by_hand(how, fp, state, HalfPlanner(), 1)
        target = {
            "half.a": torch.zeros(4, dtype=torch.float16),
            "half.s": torch.zeros(4, 2, dtype=torch.float16),
            "half.n": None,
        }
        assert fp.recover(target)
        assert torch.equal(target["half.a"], torch.arange(4.0).half())
        assert torch.equal(target["half.s"], torch.arange(8.0).view(4, 2).half())
        assert target["half.n"] == 3


@pytest.mark.parametrize("how", ["session", "save", "async"])
def test_a_planner_that_changes_tensors_is_honoured(workers: Workers, job_root: str, how: str) -> None:
    workers.run(2, half_precision, job_root, how)


def picky(job_root: str, how: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    with fpt.init(job_root, keep=0) as fp:
        state = {
            "keep.w": torch.arange(4.0),
            "keep.r": distribute_tensor(torch.ones(3), mesh, [Replicate()]),
            "drop.w": torch.ones(1000),
            "drop.n": 3,
        }
        planned_by_hand(how, fp, state, PickyPlanner(), 1)
        with flashpoint.open(fp.path(1)) as view:
            assert sorted(view) == ["keep.r", "keep.w"]


@pytest.mark.parametrize("how", ["session", "save", "async"])
def test_what_a_planner_leaves_out_is_not_stored(workers: Workers, job_root: str, how: str) -> None:
    workers.run(2, picky, job_root, how)


class OwnBytesPlanner(DefaultSavePlanner):
    """Encodes objects in a way of its own."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        import io

        return io.BytesIO(repr(object).encode()) if write_item.tensor_data is None else object


class OwnBytesLoader(DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: Any) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = value.read()


def test_objects_in_a_planners_own_encoding_need_trust(job_root: str) -> None:
    path = f"{job_root}/step-1_ckpt"
    save({"w": torch.ones(2), "n": {"x"}}, path, planner=OwnBytesPlanner())
    target: dict[str, Any] = {"w": torch.zeros(2), "n": None}
    with pytest.raises(CheckpointException, match="allow_pickle"):
        load(target, path, planner=OwnBytesLoader())
    reader = fpt.FlashpointReader(allow_pickle=True)
    dcp.load(target, checkpoint_id=path, storage_reader=reader, planner=OwnBytesLoader())
    assert target["n"] == b"{'x'}"


# ---- on one rank ------------------------------------------------------------------------------------


def test_a_part_of_a_checkpoint(job_root: str) -> None:
    path = f"{job_root}/step-1_ckpt"
    save({"a": torch.ones(2), "b": {"c": torch.ones(3), "n": 5}}, path)
    target: dict[str, Any] = {"b": {"c": torch.zeros(3)}}
    load(target, path)
    assert same(target, {"b": {"c": torch.ones(3)}})
    more = {"a": torch.zeros(2), "new": torch.full((2,), 7.0)}
    with pytest.raises(CheckpointException, match="new"):
        load(more, path)
    load(more, path, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert same(more, {"a": torch.ones(2), "new": torch.full((2,), 7.0)})


def test_a_checkpoint_is_loaded_without_a_model(job_root: str) -> None:
    state = {"a": torch.randn(2, 3), "b": {"c": [torch.randn(3), 1], "n": (1, 2)}}
    path = f"{job_root}/step-1_ckpt"
    save(state, path)
    target: dict[str, Any] = {}
    _load_state_dict(
        target,
        storage_reader=fpt.FlashpointReader(path),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    assert differences(target, state) == []


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ({"a": torch.zeros(3)}, "Size mismatch"),
        ({"a": torch.zeros(2, dtype=torch.float64)}, "'a': dtype torch.float32 there, torch.float64 here"),
        ({"n": torch.zeros(2)}, "n"),
        ({"nothing": torch.zeros(2)}, "nothing"),
    ],
)
def test_a_state_that_does_not_fit_is_an_error(job_root: str, target: dict[str, Any], says: str) -> None:
    path = f"{job_root}/step-1_ckpt"
    save({"a": torch.ones(2), "n": 3, "b": torch.ones(2)}, path)
    before = {**target, "b": torch.zeros(2)}
    if "n" in target:  # DCP's planner hands the number over, which then stands in the tensor's place
        load(before, path)
        assert before["n"] == 3
        return
    with pytest.raises(CheckpointException, match=says):
        load(before, path)
    assert torch.equal(before["b"], torch.zeros(2))


def test_a_dtype_is_converted_only_where_that_is_asked_for(job_root: str) -> None:
    path = f"{job_root}/step-1_ckpt"
    save({"a": torch.ones(2)}, path)
    target = {"a": torch.zeros(2, dtype=torch.float64)}
    dcp.load(target, checkpoint_id=path, storage_reader=fpt.FlashpointReader(cast=True))
    assert same(target, {"a": torch.ones(2, dtype=torch.float64)})


def test_a_reader_and_a_writer_serve_again(job_root: str) -> None:
    writer, reader = fpt.FlashpointWriter(f"{job_root}/step-1_ckpt"), fpt.FlashpointReader()
    dcp.save({"n": 1}, storage_writer=writer)
    dcp.save({"n": 2}, checkpoint_id=f"{job_root}/step-2_ckpt", storage_writer=writer)
    target = {"n": 0}
    for step in (1, 2, 1):
        dcp.load(target, checkpoint_id=f"{job_root}/step-{step}_ckpt", storage_reader=reader)
        assert target["n"] == step


def test_a_writer_keeps_every_version_and_a_session_what_it_is_told(job_root: str) -> None:
    for step in (1, 2, 3):
        save({"n": step}, f"{job_root}/step-{step}_ckpt")
    with fpt.init(job_root, keep=2) as fp:
        assert fp.steps() == [3, 2, 1]
        for step in (4, 5):
            dcp.save({"n": step}, checkpoint_id=fp.path(step), storage_writer=fp.writer())
        assert fp.steps() == [5, 4]


@pytest.mark.parametrize("path", ["step-1_ckpt", "/dev/shm/job/step-01_ckpt", "/dev/shm/job/latest", ""])
def test_a_path_that_is_no_container_is_refused(path: str) -> None:
    with pytest.raises(flashpoint.FlashpointError, match=r"step-<n>_ckpt|relative"):
        fpt.FlashpointWriter(path)
    with pytest.raises((CheckpointException, flashpoint.FlashpointError), match=r"step-<n>_ckpt|relative"):
        load({"n": 0}, path or "x")
    assert not fpt.FlashpointWriter.validate_checkpoint_id(path)
    assert not fpt.FlashpointReader.validate_checkpoint_id(path)


def test_without_a_path_there_is_a_message(job_root: str) -> None:
    with pytest.raises(CheckpointException, match="there is no checkpoint_id"):
        dcp.save({"n": 0}, storage_writer=fpt.FlashpointWriter())
    with pytest.raises(CheckpointException, match="there is no checkpoint_id"):
        dcp.load({"n": 0}, storage_reader=fpt.FlashpointReader())


def test_loading_what_is_not_there_says_so(job_root: str) -> None:
    with pytest.raises(CheckpointException, match=r"step 7 has no manifest"):
        load({"n": 0}, f"{job_root}/step-7_ckpt")
    os.mkdir(f"{job_root}/step-8_ckpt")
    with open(f"{job_root}/step-8_ckpt__0__unfinished", "w"):
        pass
    with pytest.raises(CheckpointException, match="step 8 .* is unfinished"):
        load({"n": 0}, f"{job_root}/step-8_ckpt")


def test_the_memory_of_a_deleted_job_root_is_given_back(job_root: str) -> None:
    import shutil

    from flashpoint_torch import writer

    save({"w": torch.ones(1000)}, f"{job_root}/a/step-1_ckpt")
    save({"w": torch.ones(1000)}, f"{job_root}/b/step-1_ckpt")
    assert f"{job_root}/a" in {key[0] for key in writer._objects}
    shutil.rmtree(f"{job_root}/a")
    save({"w": torch.ones(1000)}, f"{job_root}/b/step-2_ckpt")
    assert f"{job_root}/a" not in {key[0] for key in writer._objects}


def test_dtensor_is_what_comes_back() -> None:
    assert issubclass(DTensor, torch.Tensor)  # what `same` counts on
