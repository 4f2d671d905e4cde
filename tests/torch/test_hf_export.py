"""Exports for Hugging Face: read by Transformers' own ``from_pretrained``, equal to the last bit."""

import json
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoModelForCausalLM

import flashpoint_torch as fpt
from flashpoint.errors import ConfigError, DeadlineError
from flashpoint.export import folder as export_folder
from tests.torch import exporting
from tests.torch.exporting import folders, gpt2, llama, train_step
from tests.torch.faults import start
from tests.torch.workers import Workers

WAIT_S = 60.0
STEP = fpt.StepInfo(2, 3, 11, 4)
NAME = "epoch2epochstep3globalstep11"


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    """Equal names, dtypes and bits."""
    old, new = a.state_dict(), b.state_dict()
    return old.keys() == new.keys() and all(
        old[name].dtype == new[name].dtype
        and torch.equal(old[name].reshape(-1).view(torch.uint8), new[name].reshape(-1).view(torch.uint8))
        for name in old
    )


def exported(fp: fpt.Flashpoint, saver: fpt.Saver, model: nn.Module) -> Path:
    handle = fp.async_save({"engine": {"model": model.state_dict()}}, STEP.global_step)
    export = saver.export(STEP, handle)
    assert export is not None
    assert export.wait(WAIT_S), export.error
    return Path(export.path)


@pytest.mark.parametrize(
    "model",
    [llama(), llama(tied=True), gpt2(), llama().to(torch.bfloat16)],
    ids=["llama", "tied", "gpt2", "bfloat16"],
)
@pytest.mark.parametrize("max_shard_bytes", ["20KiB", "5GiB"])
def test_from_pretrained_is_equal(job_root: str, tmp_path: Path, model: Any, max_shard_bytes: str) -> None:
    with fpt.init(job_root) as fp:
        saver = fpt.Saver(fp, tmp_path, fpt.SaverConfig(max_shard_bytes=max_shard_bytes), model=model)
        path = exported(fp, saver, model)
        saver.close()
    assert path == tmp_path / NAME
    files = sorted(path.glob("*.safetensors"))
    if max_shard_bytes == "5GiB":
        assert [file.name for file in files] == ["model.safetensors"]
    else:
        assert len(files) > 2
        index = json.loads((path / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == {file.name for file in files}
    assert len(list(path.iterdir())) == len(files) + 2 + (len(files) > 1)  # the configurations, the index
    loaded, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert type(loaded) is type(model)
    assert same_weights(loaded, model)


def test_cast_to_another_dtype(job_root: str, tmp_path: Path) -> None:
    model = llama()
    with fpt.init(job_root) as fp:
        saver = fpt.Saver(fp, tmp_path, fpt.SaverConfig(dtype=torch.bfloat16), model=model)
        path = exported(fp, saver, model)
    loaded = AutoModelForCausalLM.from_pretrained(path)
    assert same_weights(loaded, model.to(torch.bfloat16))


def test_other_names(job_root: str, tmp_path: Path) -> None:
    """A prefix of the saved state, and names that the training's model has otherwise."""
    model = llama()
    state = {"policy": {"net": {f"wrapped.{name}": value for name, value in model.state_dict().items()}}}
    state["policy"]["net"]["value_head"] = torch.ones(3)

    def rename(name: str) -> str | None:
        return name.removeprefix("wrapped.") if name.startswith("wrapped.") else None

    with fpt.init(job_root) as fp:
        saver = fpt.Saver(
            fp, tmp_path, model_config=model.config.to_dict(), prefix="policy.net.", rename=rename
        )
        export = saver.export(STEP, fp.async_save(state, 11))
        assert export is not None and export.wait(WAIT_S)
    assert same_weights(AutoModelForCausalLM.from_pretrained(export.path), model)


# ---- sharded over ranks -----------------------------------------------------------------------------


def export_sharded(job_root: str, root: str) -> None:
    """FSDP2 shards rows; some tensors are cut along columns, unevenly, or replicated."""
    model = llama()
    with fpt.init(job_root) as fp:
        saver = fpt.Saver(fp, root, fpt.SaverConfig(max_shard_bytes="20KiB"), model=model)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model, mesh=mesh)
        state = dict(model.state_dict())
        assert all(hasattr(value, "placements") for value in state.values())
        name = "model.layers.0.mlp.down_proj.weight"
        state[name] = distribute_tensor(state[name].full_tensor(), mesh, [Shard(1)])
        handle = fp.async_save({"engine": {"model": state}}, STEP.global_step)
        export = saver.export(STEP, handle)
        assert (export is not None) == (dist.get_rank() == 0)
        if export is not None:
            assert export.wait(WAIT_S), export.error
        dist.barrier()


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_sharded_model(workers: Workers, job_root: str, tmp_path: Path, world_size: int) -> None:
    workers.run(world_size, export_sharded, job_root, str(tmp_path))
    assert same_weights(AutoModelForCausalLM.from_pretrained(tmp_path / NAME), llama())


def test_objects_of_another_node_are_told(job_root: str, tmp_path: Path) -> None:
    model = llama()
    with fpt.init(job_root) as fp:
        saver = fpt.Saver(fp, tmp_path, model=model)
        handle = fp.save({"engine": {"model": model.state_dict()}}, 11)
        next(Path(fp.path(11)).glob("*.safetensors")).unlink()
        export = saver.export(STEP, handle)
        assert export is not None and not export.wait(WAIT_S)
        assert "rank00000-0.safetensors" in str(export.error) and "set copies" in str(export.error)
    assert folders(tmp_path) == []


# ---- while training goes on -------------------------------------------------------------------------


def test_with_a_recover_handler_while_training_goes_on(job_root: str, tmp_path: Path) -> None:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    weights: dict[int, dict[str, torch.Tensor]] = {}
    config = fpt.RecoverConfig(mode="on", freq_steps=1, sigterm_timeout_s=0)
    with fpt.init(job_root, keep=1) as fp:
        saver = fpt.Saver(fp, tmp_path, fpt.SaverConfig(freq_steps=3), model=model)
        recover = fpt.RecoverHandler(fp, config, model=model, optimizer=optimizer, saver=saver)
        step = fpt.StepInfo.first(4)
        for _ in range(9):
            train_step(model, optimizer, step.global_step)
            weights[step.global_step] = {name: value.clone() for name, value in model.state_dict().items()}
            recover.dump(step)  # every step a version, the last one given up: exports hold theirs
            last, step = step, step.next()
            if len(saver._running) == 2:
                assert saver.wait(WAIT_S)
        saver.close()
        assert saver.errors == []
        assert [path.name for path in folders(tmp_path)] == [
            "epoch0epochstep2globalstep2", "epoch1epochstep1globalstep5", "epoch2epochstep0globalstep8",
        ]  # fmt: skip
    for number, path in zip((2, 5, 8), folders(tmp_path), strict=True):
        loaded = AutoModelForCausalLM.from_pretrained(path).state_dict()
        assert all(torch.equal(loaded[name], value) for name, value in weights[number].items())
    with fpt.init(job_root) as fp:  # how far the saver has counted is part of the state
        saver = fpt.Saver(fp, tmp_path, fpt.SaverConfig(freq_steps=4), model=model)
        recover = fpt.RecoverHandler(fp, config, model=model, optimizer=optimizer, saver=saver)
        found = recover.load()
        assert found is not None and found.last_step == last
        assert saver.state_dict()["steps"] == 0


def test_one_too_many_is_skipped_and_told(job_root: str, tmp_path: Path) -> None:
    model = llama()
    with fpt.init(job_root, keep=3) as fp:  # an export that has not begun finds its version
        saver = fpt.Saver(fp, tmp_path, model=model)
        with saver._writing:  # as if a slow disk held it up
            exports, step = [], fpt.StepInfo.first(9)
            for _ in range(3):
                handle = fp.save({"engine": {"model": model.state_dict()}}, step.global_step)
                exports.append(saver.export(step, handle))
                step = step.next()
            assert "under way already" in str(exports[2] and exports[2].error)
        assert [export is not None and export.wait(WAIT_S) for export in exports] == [True, True, False]
        assert len(saver.errors) == 1


def test_a_disk_that_hangs_holds_training_up_for_so_long_and_no_longer(
    job_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    write = export_folder._write
    monkeypatch.setattr(export_folder, "_write", lambda fd, data: (answers.wait(WAIT_S), write(fd, data)))
    model = llama()
    with fpt.init(job_root, keep=1) as fp:
        saver = fpt.Saver(fp, tmp_path, fpt.SaverConfig(mode="sync", timeout_s=0.5), model=model)
        step, first = STEP, None
        for _ in range(3):  # and the saves after it, of which one is exported, too, are none the wiser
            handle = fp.save({"engine": {"model": model.state_dict()}}, step.global_step)
            assert handle.error is None
            first = first or saver.export(step, handle)
            step = step.next()
        assert first is not None and not first.done() and isinstance(first.error, DeadlineError)
        assert f"step 11 is not exported to {tmp_path / NAME} after 0.5 s" in saver.errors[0]
        second = saver.export(step, handle)
        assert second is not None and f"{NAME} under way already" in str(second.error)
        assert folders(tmp_path) == []
        answers.set()
        assert first.wait(WAIT_S) and first.error is None
        third = saver.export(step, handle)
        assert third is not None and third.done()
    assert [path.name for path in folders(tmp_path)] == [NAME, third.path.rpartition("/")[2]]
    for path in folders(tmp_path):
        assert same_weights(AutoModelForCausalLM.from_pretrained(path), model)


def test_an_export_waits_for_the_one_before_it_no_longer_than_told(job_root: str, tmp_path: Path) -> None:
    model = llama()
    with fpt.init(job_root) as fp:
        saver = fpt.Saver(fp, tmp_path, fpt.SaverConfig(wait_s=0.5), model=model)
        with saver._writing:  # as if a disk that hangs held it up
            export = saver.export(STEP, fp.save({"engine": {"model": model.state_dict()}}, 11))
            assert export is not None and not export.wait(WAIT_S)
            assert "the export before it still writes after 0.5 s" in str(export.error)


def test_a_save_that_failed_is_no_export(job_root: str, tmp_path: Path) -> None:
    with fpt.init(job_root, memory_limit_bytes="16KiB") as fp:
        model = llama()
        saver = fpt.Saver(fp, tmp_path, fpt.SaverConfig(mode="sync"), model=model)
        handle = fp.async_save({"engine": {"model": model.state_dict()}}, 11)
        assert handle.error is not None
        export = saver.export(STEP, handle)
        assert export is not None and export.error is handle.error
        assert "memory_limit_bytes" in saver.errors[0]
    assert folders(tmp_path) == []


def test_the_same_step_again_replaces_it(job_root: str, tmp_path: Path) -> None:
    with fpt.init(job_root) as fp:
        saver = fpt.Saver(fp, tmp_path, model=llama())
        exported(fp, saver, llama(seed=1))
        path = saver.path(STEP)
        export = saver.export(STEP, fp.save({"engine": {"model": llama(seed=2).state_dict()}}, 12))
        assert export is not None and export.wait(WAIT_S)
    assert same_weights(AutoModelForCausalLM.from_pretrained(path), llama(seed=2))
    assert [child.name for child in tmp_path.iterdir()] == [NAME]


def peak_while_exporting(job_root: str, root: str) -> tuple[int, int]:
    """Bytes of the model, and by how much this process's own memory grew at most while it was exported."""
    model = llama(hidden=1024)
    state = {"engine": {"model": model.state_dict()}}
    with fpt.init(job_root) as fp:
        saver = fpt.Saver(fp, root, fpt.SaverConfig(max_shard_bytes="50MiB"), model=model)
        handle = fp.save(state, STEP.global_step)
        before = peak = own_memory()
        export = saver.export(STEP, handle)
        assert export is not None
        while not export.wait(0.001):
            assert export.error is None
            peak = max(peak, own_memory())
    return sum(value.nbytes for value in model.state_dict().values()), peak - before


def own_memory() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def test_the_model_is_never_held_whole(job_root: str, tmp_path: Path) -> None:
    nbytes, grown = start(peak_while_exporting, job_root, str(tmp_path)).answer()
    assert nbytes > 70 << 20
    assert grown < 40 << 20


# ---- killed -----------------------------------------------------------------------------------------


def kill_exports(job_root: str, tmp_path: Path, seconds: Iterator[float]) -> None:
    root, log = tmp_path / "exports", tmp_path / "log"
    root.mkdir(exist_ok=True)
    unfinished = 0
    for pause_s in seconds:
        log.unlink(missing_ok=True)
        worker = start(exporting.export_for_ever, 0, job_root, str(root), str(log))
        deadline = time.monotonic() + WAIT_S
        while not (log.exists() and "exported" in log.read_text()):
            assert time.monotonic() < deadline, "no export"
            time.sleep(0.002)
        time.sleep(pause_s)  # which moment of which export it hits is left to chance
        worker.kill()
        worker.join()
        unfinished += len(list(root.glob(".*.tmp")))
        for folder in folders(root):
            number = int(folder.name.rpartition("globalstep")[2])
            index = json.loads((folder / "model.safetensors.index.json").read_text())
            for name, file in index["weight_map"].items():
                with safe_open(folder / file, "pt") as tensors:
                    assert bool((tensors.get_tensor(name) == number).all()), (folder, name)
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()
    with fpt.init(job_root) as fp:
        fpt.Saver(fp, root, model=llama())
    assert list(root.glob(".*.tmp")) == []
    print("temporary folders left by kills:", unfinished)


def test_a_kill_leaves_no_half_export(job_root: str, tmp_path: Path) -> None:
    kill_exports(job_root, tmp_path, iter([0.0, random.uniform(0, 0.05)]))


@pytest.mark.soak
def test_kills_at_many_moments_leave_no_half_export(job_root: str, tmp_path: Path) -> None:
    kill_exports(job_root, tmp_path, (random.uniform(0, 0.2) for _ in range(50)))


# ---- what is wrong from the beginning ---------------------------------------------------------------


def test_what_is_wrong_is_told_when_it_is_made(job_root: str, tmp_path: Path) -> None:
    model = llama()
    empty = tmp_path / "empty"
    empty.mkdir()
    with fpt.init(job_root) as fp:
        with pytest.raises(ConfigError, match="tokenizer: there is no folder"):
            fpt.Saver(fp, tmp_path, model=model, tokenizer=str(tmp_path / "nowhere"))
        with pytest.raises(ConfigError, match="none of a tokenizer's files"):
            fpt.Saver(fp, tmp_path, model=model, tokenizer=empty)
        with pytest.raises(ConfigError, match="model_type"):
            fpt.Saver(fp, tmp_path, model=nn.Linear(2, 2))
        with pytest.raises(ConfigError, match="no configuration can be read"):
            fpt.Saver(fp, tmp_path, model_config=tmp_path / "config.json")
        with pytest.raises(ConfigError, match="mode must be on"):
            fpt.RecoverHandler(
                fp, fpt.RecoverConfig(), model=model, saver=fpt.Saver(fp, tmp_path, model=model)
            )
    wrong: list[dict[str, Any]] = [
        {"mode": "later"}, {"timeout_s": 0}, {"dtype": torch.int8}, {"max_shard_bytes": "much"}, {"freq_steps": 0},
    ]  # fmt: skip
    for bad in wrong:
        with pytest.raises(ConfigError):
            fpt.SaverConfig(**bad)


def test_tokenizer_and_configuration_from_folders(job_root: str, tmp_path: Path) -> None:
    model = llama()
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text('{"version": "1.0"}')
    (tokenizer / "README").write_text("not part of it")
    model.config.save_pretrained(tmp_path)
    with fpt.init(job_root) as fp:
        saver = fpt.Saver(fp, tmp_path / "out", model_config=tmp_path, tokenizer=tokenizer)
        path = exported(fp, saver, model)
    assert (path / "tokenizer.json").read_text() == '{"version": "1.0"}'
    assert not (path / "README").exists()
    assert same_weights(AutoModelForCausalLM.from_pretrained(path), model)
