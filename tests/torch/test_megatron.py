"""Megatron-Core's dist_checkpointing and tensor-parallel layers, on CPUs, killed and resumed."""

import importlib.util
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.torch import faults
from tests.torch.trainers import die, losses, resumed, run_attempts

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed: pip install flashpoint[megatron]", allow_module_level=True)

STEPS, EVERY = 24, 2


class Net(torch.nn.Module):
    """Megatron's two parallel layers, one after the other."""

    def __init__(self) -> None:
        from megatron.core import ModelParallelConfig, tensor_parallel

        super().__init__()
        size = dist.get_world_size()
        config = ModelParallelConfig(tensor_model_parallel_size=size, use_cpu_initialization=True)
        config.perform_initialization = True
        settings: dict[str, Any] = {
            "config": config,
            "init_method": lambda w: torch.nn.init.normal_(w, std=0.1),
            "bias": True,
        }
        self.up = tensor_parallel.ColumnParallelLinear(8, 16, gather_output=False, **settings)
        self.down = tensor_parallel.RowParallelLinear(
            16, 4, input_is_parallel=True, skip_bias_add=False, **settings
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.dropout(torch.nn.functional.gelu(self.up(x)[0]), 0.2)
        return self.down(hidden)[0]

    def sharded_state_dict(self) -> dict[str, Any]:
        from megatron.core import parallel_state

        metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        return {
            **self.up.sharded_state_dict("up.", metadata=metadata),
            **self.down.sharded_state_dict("down.", metadata=metadata),
        }


def state_of(model: Net, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """As Megatron's own training makes it: sharded tensors, an object for each rank, and the rest in common."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.dist_checkpointing.optimizer import (
        get_param_id_to_sharded_param_map,
        optim_state_to_sharding_state,
    )

    from flashpoint_torch.training_state import rng_state

    sharded = model.sharded_state_dict()
    optim = optimizer.state_dict()
    counts = {number: state["step"].item() for number, state in optim["state"].items()}
    ids = get_param_id_to_sharded_param_map(
        sharded, (p for group in optimizer.param_groups for p in group["params"])
    )
    optim_state_to_sharding_state(optim, ids, exclude_keys=("step",))
    rank, world = dist.get_rank(), dist.get_world_size()
    return {
        "model": sharded,
        "optimizer": optim,
        "counts": counts,
        "rng": ShardedObject("rng", rng_state(), (world,), (rank,), replica_id=0),
        "step": step,
    }


def fit(rank: int, *, job_root: str, folder: str, die_at: tuple[int, int] | None = None) -> None:
    """Train on two tensor-parallel ranks; `die_at` is a rank and the step in which it kills itself."""
    from megatron.core import dist_checkpointing, parallel_state

    from flashpoint_torch.megatron import FlashpointStrategies
    from flashpoint_torch.training_state import set_rng_state

    log = faults.Log(f"{folder}/log.{rank}")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    torch.manual_seed(5)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model(torch.zeros(4, 8)).sum().backward()  # as Megatron does: states must be there to be loaded into
    optimizer.step()
    optimizer.zero_grad()
    memory = FlashpointStrategies(job_root, keep=1)
    found, done = memory.resume(), 0
    if found is not None:
        state = dist_checkpointing.load(state_of(model, optimizer, 0), found.folder, memory.load_strategy)
        model.load_state_dict(state["model"], strict=False)
        for number, count in state["counts"].items():
            state["optimizer"]["state"][number]["step"] = torch.tensor(count)
        optimizer.load_state_dict(state["optimizer"])
        set_rng_state(state["rng"])
        done = state["step"]
        assert done == found.step
    log.write("began", done)
    request = None
    for step in range(done + 1, STEPS + 1):
        if die_at == (rank, step):
            deadline = time.monotonic() + 60
            while not memory.session.steps() and time.monotonic() < deadline:
                time.sleep(0.01)
            die()
        x = torch.rand(4, 8) + 0.01 * step
        x = x if rank == 0 else x * 0
        dist.all_reduce(x)
        loss = (model(x) - x[:, :4]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log.write("loss", step, loss.item().hex())
        if step % EVERY == 0:
            if request is not None:
                request.execute_sync()
            # One save and the next by turns: asynchronous, synchronous.
            request = dist_checkpointing.save(
                state_of(model, optimizer, step),
                memory.folder(step),
                memory.save_strategy,
                async_sharded_save=step % (2 * EVERY) == 0,
            )
    if request is not None:
        request.execute_sync()
    memory.close()
    whole = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    torch.save(whole, f"{folder}/weights.{rank}")


def load_alone(rank: int, *, job_root: str, folder: str) -> None:
    """Load on one rank what two have saved."""
    from megatron.core import dist_checkpointing, parallel_state

    from flashpoint_torch.megatron import FlashpointStrategies

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model = Net()
    memory = FlashpointStrategies(job_root, keep=1)
    found = memory.resume()
    assert found is not None and found.step == STEPS
    state = dist_checkpointing.load({"model": model.sharded_state_dict()}, found.folder, memory.load_strategy)
    memory.close()
    halves = [torch.load(f"{folder}/weights.{rank}") for rank in range(2)]
    joined = {
        "up.weight": torch.cat([half["up.weight"] for half in halves]),
        "up.bias": torch.cat([half["up.bias"] for half in halves]),
        "down.weight": torch.cat([half["down.weight"] for half in halves], 1),
        "down.bias": halves[0]["down.bias"],
    }
    for name, tensor in joined.items():
        assert torch.equal(state["model"][name], tensor), name
    assert state["step"] == STEPS


def round_trip_of_gpt(rank: int, *, job_root: str) -> None:
    """Megatron's whole GPT, whose forward needs CUDA: its state alone, into a model of other weights."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    from flashpoint_torch.megatron import FlashpointStrategies

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    models = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        config = TransformerConfig(
            num_layers=2,
            hidden_size=16,
            num_attention_heads=2,
            use_cpu_initialization=True,
            tensor_model_parallel_size=2,
        )
        spec = get_gpt_layer_local_spec(normalization="LayerNorm")
        models.append(GPTModel(config, spec, vocab_size=64, max_sequence_length=16))
    states = [dict(model.named_parameters()) for model in models]
    assert not all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    memory = FlashpointStrategies(job_root, keep=1)
    dist_checkpointing.save(
        {"model": models[0].sharded_state_dict(metadata=metadata), "iteration": 7},
        memory.folder(7),
        memory.save_strategy,
    )
    found = memory.resume()
    assert found is not None and found.step == 7
    state = dist_checkpointing.load(
        {"model": models[1].sharded_state_dict(metadata=metadata)}, found.folder, memory.load_strategy
    )
    models[1].load_state_dict(state["model"], strict=False)
    assert state["iteration"] == 7
    for name, parameter in states[0].items():
        assert torch.equal(parameter, states[1][name]), name
    memory.close()


IMPORTS = ["megatron.core.dist_checkpointing", "megatron.core.tensor_parallel", "flashpoint_torch.megatron"]


def test_losses_after_kills_are_those_of_the_uninterrupted_run(job_root: str, tmp_path: Path) -> None:
    rng = random.Random()
    first = rng.randrange(EVERY + 2, STEPS // 2)
    second = rng.randrange(first + 1, STEPS + 1)
    where = f"killed in steps {first} and {second}"
    peace, war = tmp_path / "peace", tmp_path / "war"
    for folder in (peace, war):
        folder.mkdir()
    killed = {"job_root": f"{job_root}/war", "folder": str(war)}
    codes = run_attempts(
        IMPORTS,
        2,
        fit,
        [
            {"job_root": f"{job_root}/peace", "folder": str(peace)},
            {**killed, "die_at": (rng.randrange(2), first)},
            {**killed, "die_at": (rng.randrange(2), second)},
            killed,
        ],
    )
    assert [-9 in attempt for attempt in codes] == [False, True, True, False], (codes, where)
    assert codes[0] == codes[3] == [0, 0], (codes, where)
    for rank in range(2):
        expected = losses(peace, rank)
        assert sorted(expected) == list(range(1, STEPS + 1)), where
        assert losses(war, rank) == expected, where
        began = resumed(war, rank)
        assert began[0] == 0 and 0 < began[1] < first and began[1] <= began[2] < second, (began, where)
    assert not os.path.exists(f"{job_root}/war.mcore")

    assert run_attempts(IMPORTS, 1, load_alone, [killed]) == [[0]]


def test_the_state_of_megatrons_gpt_comes_back(job_root: str) -> None:
    imports = [*IMPORTS, "megatron.core.models.gpt"]
    assert run_attempts(imports, 2, round_trip_of_gpt, [{"job_root": job_root}]) == [[0, 0]]
