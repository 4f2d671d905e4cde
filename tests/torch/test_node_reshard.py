"""Another number of ranks on other nodes: each gets the parts that it needs from whoever holds them."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import flashpoint_torch as fpt
from tests.torch.nodes import Cluster

ROWS, COLUMNS = 1030, 256  # uneven for 2, 3 and 4 ranks; a megabyte in chunks of 64 KiB


def whole(step: int) -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS) + step


def sharded(value: torch.Tensor) -> DTensor:
    return distribute_tensor(value, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])


def save_step(rank: int, job_root: str, **settings: Any) -> None:
    with fpt.init(job_root, **settings) as fp:
        state = {"weight": sharded(whole(1)), "step": 1}
        assert fp.save(state, 1).wait("replicated", timeout_s=30)


def load_parts(rank: int, job_root: str, **settings: Any) -> tuple[str, bool, int]:
    with fpt.init(job_root, **settings) as fp:
        state = {"weight": sharded(torch.zeros(ROWS, COLUMNS)), "step": 0}
        result = fp.recover(state)
        assert result is not None
        exact = torch.equal(state["weight"].to_local(), sharded(whole(1)).to_local()) and state["step"] == 1
        return result.tier, exact, result.nbytes


@pytest.mark.parametrize(("before", "after"), [([1, 1], [1, 4]), ([2, 2], [1, 2])])
@pytest.mark.fault(40)
def test_ranks_of_a_replaced_node_get_different_parts_of_the_same_objects(
    before: list[int], after: list[int]
) -> None:
    with Cluster(2, ranks_per_node=before, copies=1) as first:
        first.run(save_step)
        first.await_no_agents()
        first.nodes[1].wipe()
        with Cluster(2, ranks_per_node=after, copies=1, folder=first.folder) as second:
            answers = second.run(load_parts)
            assert [(tier, exact) for tier, exact, _ in answers] == [("peer", True)] * sum(after)


# ---- how much is fetched ----------------------------------------------------------------------------

MANY_ROWS = 1 << 14  # 16 MiB: objects that are large against chunks of 64 KiB
PAIRS = list(itertools.product((1, 2, 3, 4), repeat=2))
IN_EVERY_RUN = {(1, 3), (3, 2), (4, 3)}


def big() -> torch.Tensor:
    return torch.arange(MANY_ROWS * COLUMNS, dtype=torch.float32).view(MANY_ROWS, COLUMNS)


def rows_of(rank: int, world_size: int) -> range:
    """The rows of a rank's shard, as torch cuts them."""
    share = -(-MANY_ROWS // world_size)
    return range(MANY_ROWS)[rank * share : (rank + 1) * share]


def big_state(*, zeros: bool = False) -> dict[str, torch.Tensor]:
    value = torch.zeros_like(big()) if zeros else big()
    return {"weight": sharded(value) if dist.is_initialized() else value}


def local(state: dict[str, torch.Tensor]) -> torch.Tensor:
    value = state["weight"]
    return value.to_local() if isinstance(value, DTensor) else value


def save_big(rank: int, job_root: str, **settings: Any) -> None:
    with fpt.init(job_root, **settings) as fp:
        assert fp.save(big_state(), 1).wait("replicated", timeout_s=60)


def load_big(rank: int, job_root: str, **settings: Any) -> tuple[bool, int]:
    """Whether it was exact, and the bytes that came from peers for this rank."""
    with fpt.init(job_root, **settings) as fp:
        assert fp._replication is not None
        nbytes, retrieve = [0], fp._replication.retrieve

        def counted(*args: Any, **kwargs: Any) -> int:
            nbytes.append(retrieve(*args, **kwargs))
            return nbytes[-1]

        fp._replication.retrieve = counted  # type: ignore[method-assign]
        state = big_state(zeros=True)
        assert fp.recover(state) is not None
        return torch.equal(local(state), local(big_state())), sum(nbytes)


@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param(*pair, marks=[] if pair in IN_EVERY_RUN else pytest.mark.soak) for pair in PAIRS],
)
def test_a_rank_fetches_what_its_node_lacks_and_hardly_more(before: int, after: int) -> None:
    copies = 1 if after > 1 else before - 1  # so that the nodes that are left hold all of it
    with Cluster(before, copies=max(copies, 1)) as first:
        first.run(save_big)
        first.await_no_agents()
        if before == after > 1:
            first.nodes[-1].wipe()
        held = [{int(name[4:9]) for name in names} for names in first.objects(1)] + [set()] * after
        with Cluster(after, copies=1, folder=first.folder) as second:
            answers = second.run(load_big)
    for rank, (exact, fetched) in enumerate(answers):
        assert exact
        rows = set(rows_of(rank, after))
        lacking = [rows & set(rows_of(other, before)) for other in range(before) if other not in held[rank]]
        needed = 4 * COLUMNS * sum(map(len, lacking))
        print(f"{before} -> {after}, rank {rank}: {fetched:,} bytes fetched, {needed:,} needed")
        assert needed <= fetched <= 1.1 * needed, (rank, needed, fetched)
