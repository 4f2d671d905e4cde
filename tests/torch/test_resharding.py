"""A version is loaded by another number of ranks, over another mesh, with other placements."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import flashpoint
import flashpoint_torch as fpt
from flashpoint.errors import MismatchError
from flashpoint_torch.plan import PlanCache
from flashpoint_torch.restore import Restore
from tests.torch.states import same
from tests.torch.workers import Workers

R, S0, S1 = Replicate(), Shard(0), Shard(1)

ONE_MESH: list[list[Placement]] = [[S0], [S1], [R]]
TWO_BY_TWO: list[list[Placement]] = [[S0, S1], [S1, S0], [R, S0], [S1, R], [S0, S0], [R, R]]

SHAPES = {
    "even": (8, 12),
    "uneven": (7, 5),
    "small": (2, 3),  # fewer rows than ranks: some hold nothing
    "one": (1, 1),
    "deep": (4, 3, 2),
    "empty": (0, 4),
}


def whole(name: str, add: float = 0.0) -> torch.Tensor:
    shape = SHAPES[name]
    count = torch.Size(shape).numel()
    return torch.arange(float(count)).view(shape) + add


def sharded(mesh: DeviceMesh, placements: list[Placement], *, zeros: bool = False) -> dict[str, Any]:
    state: dict[str, Any] = {
        name: distribute_tensor(torch.zeros(SHAPES[name]) if zeros else whole(name), mesh, placements)
        for name in SHAPES
    }
    state["plain"] = torch.zeros(3) if zeros else torch.arange(3.0)
    state["step"] = None if zeros else 5
    return state


def check(state: dict[str, Any], mesh: DeviceMesh, placements: list[Placement]) -> None:
    wanted = sharded(mesh, placements)
    for name in wanted:
        assert same(state[name], wanted[name]), name


def meshes() -> list[tuple[DeviceMesh, list[Placement]]]:
    """Every way in which the ranks of this run share the tensors."""
    world_size = dist.get_world_size()
    flat = init_device_mesh("cpu", (world_size,))
    ways = [(flat, placements) for placements in ONE_MESH]
    if world_size == 4:
        square = init_device_mesh("cpu", (2, 2))
        ways += [(square, placements) for placements in TWO_BY_TWO]
        ways.append((init_device_mesh("cpu", (4, 1)), [S1, R]))
    return ways


def save_all(job_root: str, through_dcp: bool) -> int:
    ways = meshes()
    with fpt.init(job_root, keep=0) as fp:
        for step, (mesh, placements) in enumerate(ways):
            state = sharded(mesh, placements)
            if through_dcp:
                dcp.save(state, checkpoint_id=fp.path(step), storage_writer=fp.writer())
            else:
                handle = fp.save(state, step)
                assert handle.error is None, handle.error
    return len(ways)


def load_all(job_root: str, count: int) -> None:
    with fpt.init(job_root, keep=0) as fp:
        for step in range(count):
            for mesh, placements in meshes():
                state = sharded(mesh, placements, zeros=True)
                local = [t.to_local().data_ptr() for t in state.values() if isinstance(t, DTensor)]
                assert fp.recover(state, step=step)
                check(state, mesh, placements)
                assert local == [t.to_local().data_ptr() for t in state.values() if isinstance(t, DTensor)]
                state = sharded(mesh, placements, zeros=True)
                dcp.load(state, checkpoint_id=fp.path(step), storage_reader=fp.reader())
                check(state, mesh, placements)
            plain = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
            assert fp.recover(plain, step=step, partial=True)
            assert all(torch.equal(plain[name], whole(name)) for name in SHAPES)


@pytest.mark.parametrize("through_dcp", [False, True])
@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 1), (1, 2), (2, 3), (3, 2), (4, 3), (1, 4)])
@pytest.mark.fault(40)
def test_another_number_of_ranks(
    workers: Workers, job_root: str, saved_by: int, loaded_by: int, through_dcp: bool
) -> None:
    count = workers.run(saved_by, save_all, job_root, through_dcp)[0]
    workers.run(loaded_by, load_all, job_root, count)


@pytest.mark.parametrize("through_dcp", [False, True])
def test_every_mesh_of_four_ranks_loads_what_any_other_saved(
    workers: Workers, job_root: str, through_dcp: bool
) -> None:
    count = workers.run(4, save_all, job_root, through_dcp)[0]
    workers.run(4, load_all, job_root, count)


def save_plain(job_root: str) -> None:
    with fpt.init(job_root) as fp:
        state = {name: whole(name) for name in SHAPES} | {"plain": torch.arange(3.0), "step": 5}
        assert fp.save(state, 0).error is None


def test_a_tensor_that_was_not_sharded_is_loaded_sharded(workers: Workers, job_root: str) -> None:
    workers.run(1, save_plain, job_root)
    workers.run(4, load_all, job_root, 1)


# ---- what belongs to a rank -------------------------------------------------------------------------


def own_state(rank: int) -> dict[str, Any]:
    return {"generator": torch.full((rank + 1,), float(rank)), "name": f"rank {rank}", "table": {rank}}


def save_own(job_root: str) -> None:
    with fpt.init(job_root) as fp:
        assert fp.save(own_state(dist.get_rank()), 1).error is None


def load_own(job_root: str, from_rank: list[int]) -> None:
    with fpt.init(job_root) as fp:
        rank = from_rank[dist.get_rank()]
        target = {"generator": torch.zeros(rank + 1), "name": None, "table": None}
        assert fp.recover(target)
        assert same(target, own_state(rank))


@pytest.mark.parametrize(("world_size", "from_rank"), [(2, [0, 1]), (1, [0]), (3, [0, 1, 0])])
@pytest.mark.fault(40)
def test_every_rank_gets_its_own_and_new_ranks_that_of_the_first(
    workers: Workers, job_root: str, world_size: int, from_rank: list[int]
) -> None:
    workers.run(2, save_own, job_root)
    workers.run(world_size, load_own, job_root, from_rank)


# ---- who stores a replica ---------------------------------------------------------------------------


def stored_bytes(job_root: str, make: Callable[[DeviceMesh], DTensor]) -> tuple[int, int]:
    mesh = init_device_mesh("cpu", (2, 2))
    state = {f"w{n}": make(mesh) for n in range(16)}
    with fpt.init(job_root) as fp:
        assert fp.save(state, 1).error is None
        with flashpoint.open(fp.path(1)) as view:
            sizes = [
                sum(entry.nbytes for entry in view.manifest.layout(record).entries)
                for record in view.manifest.objects
            ]
        target = {f"w{n}": make(mesh) for n in range(16)}
        for tensor in target.values():
            tensor.to_local().zero_()
        assert fp.recover(target)
        assert all(same(target[name], state[name]) for name in state)
        # Who stores less than it loads plans for loading apart: saves go on as before.
        assert fp.save(state, 2).error is None
    return sum(sizes), max(sizes)


def replicated(mesh: DeviceMesh) -> DTensor:
    return distribute_tensor(torch.arange(64.0), mesh, [R, R])


def hybrid(mesh: DeviceMesh) -> DTensor:
    return distribute_tensor(torch.arange(64.0), mesh, [R, S0])


@pytest.mark.parametrize("make", [replicated, hybrid])
def test_a_replica_is_stored_once_and_the_work_is_spread(
    workers: Workers, job_root: str, make: Callable[[DeviceMesh], DTensor]
) -> None:
    total, most = workers.run(4, stored_bytes, job_root, make)[0]
    assert total == 16 * 64 * 4
    assert most < total / 2


def on_a_part_of_the_ranks(job_root: str) -> None:
    mesh = DeviceMesh("cpu", [1, 2])  # ranks 0 and 3 are not in it
    tensor = DTensor.from_local(
        torch.full((2, 2), float(dist.get_rank())) if dist.get_rank() in (1, 2) else torch.empty(0),
        mesh,
        [S0],
        run_check=False,
        shape=torch.Size((4, 2)),
        stride=(2, 1),
    )
    with fpt.init(job_root) as fp:
        assert fp.save({"expert": tensor, "n": 1}, 1).error is None
        plain = {"expert": torch.zeros(4, 2), "n": 0}
        assert fp.recover(plain)
        assert torch.equal(plain["expert"], torch.tensor([1.0, 1, 2, 2]).view(4, 1).expand(4, 2))
        assert fp.save({"expert": tensor, "n": 2}, 2).error is None
        if dist.get_rank() in (1, 2):
            tensor.to_local().zero_()
        assert fp.recover({"expert": tensor, "n": 0})
        if dist.get_rank() in (1, 2):
            assert torch.equal(tensor.to_local(), torch.full((2, 2), float(dist.get_rank())))


def test_a_tensor_that_lives_on_some_of_the_ranks(workers: Workers, job_root: str) -> None:
    workers.run(4, on_a_part_of_the_ranks, job_root)


# ---- each rank has names of its own -----------------------------------------------------------------

LAYERS = 8


def stage(*, zeros: bool = False) -> dict[str, Any]:
    """This rank's layers of a pipeline: an even share, the first ranks' somewhat larger."""
    mine = range(LAYERS)[dist.get_rank() :: dist.get_world_size()]
    state: dict[str, Any] = {
        f"layers.{n}": {"weight": torch.zeros(3, 4) if zeros else torch.arange(12.0).view(3, 4) + n}
        for n in mine
    }
    return {**state, "step": 0 if zeros else 5}


def save_stage(job_root: str) -> None:
    with fpt.init(job_root) as fp:
        assert fp.save(stage(), 5).error is None


def load_stage(job_root: str) -> None:
    with fpt.init(job_root) as fp:
        state = stage(zeros=True)
        assert fp.recover(state)
        assert same(state, stage())


def load_all_stages_but_one(job_root: str) -> str:
    with fpt.init(job_root) as fp:
        state = stage(zeros=True)
        state.pop("layers.3", None)
        with pytest.raises(MismatchError) as failure:
            fp.recover(state)
        kept = dict(state)
        assert fp.recover(state, partial=True)
        assert kept.keys() == state.keys()
        return str(failure.value)


@pytest.mark.parametrize("saved_by", [1, 2, 4])
def test_stages_of_a_pipeline_are_loaded_by_any_number_of_stages(
    workers: Workers, job_root: str, saved_by: int
) -> None:
    workers.run(saved_by, save_stage, job_root)
    for loaded_by in (1, 2, 3, 4):
        workers.run(loaded_by, load_stage, job_root)


def test_a_layer_that_no_stage_wants_is_named_on_all_ranks(workers: Workers, job_root: str) -> None:
    workers.run(2, save_stage, job_root)
    for text in workers.run(3, load_all_stages_but_one, job_root):
        assert "in 1 places" in text
        assert "'layers.3.weight': in the checkpoint, not in the state" in text


# ---- how much is read -------------------------------------------------------------------------------

PARAMETERS = {"embedding": (1024, 64), "up": (256, 192), "down": (192, 250), "norm": (192,)}


def by_rows(*, zeros: bool = False) -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: distribute_tensor(
            torch.zeros(shape) if zeros else torch.arange(float(torch.Size(shape).numel())).view(shape),
            mesh,
            [S0],
        )
        for name, shape in PARAMETERS.items()
    }


def save_rows(job_root: str) -> None:
    with fpt.init(job_root) as fp:
        assert fp.save(by_rows(), 1).error is None


def load_rows(job_root: str) -> tuple[int, int]:
    """Bytes of this rank's shards, and bytes read for them."""
    with fpt.init(job_root) as fp:
        state = by_rows(zeros=True)
        with flashpoint.open(fp.path(1), rank=dist.get_rank()) as view:
            needs = Restore(state, view, plans=PlanCache()).needs()
        assert fp.recover(state)
        wanted = by_rows()
        assert all(same(state[name], wanted[name]) for name in wanted)
        own = sum(tensor.to_local().nbytes for tensor in state.values())
        return own, sum(need.end - need.begin for need in needs)


@pytest.mark.parametrize("saved_by", [1, 2, 3, 4])
def test_a_rank_reads_what_it_needs_and_hardly_more(workers: Workers, job_root: str, saved_by: int) -> None:
    workers.run(saved_by, save_rows, job_root)
    for loaded_by in (1, 2, 3, 4):
        for own, read in workers.run(loaded_by, load_rows, job_root):
            assert own <= read <= 1.1 * own, (loaded_by, own, read)
