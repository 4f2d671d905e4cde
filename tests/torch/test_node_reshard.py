"""Another number of ranks on other nodes: each gets the parts that it needs from whoever holds them."""

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
