"""Real training under lightning's Trainer, killed and resumed."""

import hashlib
import importlib
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from flashpoint.errors import FlashpointError
from tests.torch import faults
from tests.torch.trainers import die, losses, resumed, run_attempts

pytest.importorskip(
    "lightning.pytorch", reason="lightning is not installed: pip install flashpoint[lightning]"
)

pytest.importorskip("torchdata", reason="torchdata is not installed: its loaders have a state")

BATCHES, EPOCHS = 12, 3
STEPS = BATCHES * EPOCHS
EVERY, SKIP, FILE_EVERY = 3, 27, 8


def fit(
    rank: int,
    *,
    job_root: str,
    folder: str,
    die_at: tuple[int, int] | None = None,
    fallback: str | None = None,
    steps: int = STEPS,
) -> None:
    """Train on one of two ranks; the log has each step's loss, as ``float.hex`` writes it.

    Args:
        die_at: a rank and the step in which it kills itself, once some version is complete.
    """
    import lightning.pytorch as pl
    from torchdata.stateful_dataloader import StatefulDataLoader

    from flashpoint_torch.lightning import FlashpointCallback, FlashpointCheckpointIO

    log = faults.Log(f"{folder}/log.{rank}")

    class Noisy(torch.utils.data.Dataset[Any]):
        """Samples that differ each time that they are asked for, by torch's and by Python's dice."""

        def __len__(self) -> int:
            return BATCHES * 2 * 4

        def __getitem__(self, i: int) -> torch.Tensor:
            return torch.full((8,), i / 10) + torch.rand(8) + random.random()

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(8, 16),
                torch.nn.BatchNorm1d(16),
                torch.nn.Dropout(0.3),
                torch.nn.Linear(16, 1),
            )

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            if die_at == (rank, self.global_step + 1):
                deadline = time.monotonic() + 60
                while not memory.session.steps() and time.monotonic() < deadline:
                    time.sleep(0.01)
                die()
            loss = (self.layers(batch) - batch.sum(1, keepdim=True)).square().mean()
            log.write("loss", self.global_step + 1, loss.item().hex())
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def on_train_start(self) -> None:
            log.write("began", self.global_step, digest_of(self.state_dict()))

    torch.use_deterministic_algorithms(True)
    pl.seed_everything(7 + rank, verbose=False)
    model = Model()
    if rank:  # DDP gives every rank the first one's weights, resumed or not
        torch.nn.init.zeros_(model.layers[0].weight)
    memory = FlashpointCheckpointIO(job_root, fallback=fallback, keep=1)
    files = pl.callbacks.ModelCheckpoint(
        dirpath=f"{folder}/files", every_n_train_steps=FILE_EVERY, save_top_k=-1
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=EPOCHS,
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        plugins=[memory],
        callbacks=[FlashpointCallback(memory, every_n_steps=EVERY, skip_every_n_steps=SKIP), files],
    )
    dataset = Noisy()
    sampler = torch.utils.data.DistributedSampler(dataset, 2, rank, shuffle=True, seed=3)
    trainer.fit(model, StatefulDataLoader(dataset, batch_size=4, sampler=sampler), ckpt_path=memory.resume)
    log.write("ended", trainer.global_step)


def digest_of(state: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode() + state[name].contiguous().numpy().tobytes())
    return digest.hexdigest()


def test_losses_after_kills_are_those_of_the_uninterrupted_run(job_root: str, tmp_path: Path) -> None:
    rng = random.Random()
    first, second = rng.randrange(EVERY + 2, BATCHES), rng.randrange(BATCHES + 5, STEPS)
    where = f"killed in steps {first} and {second}"
    peace, war = tmp_path / "peace", tmp_path / "war"
    for folder in (peace, war):
        folder.mkdir()
    killed = {"job_root": f"{job_root}/war", "folder": str(war)}
    stored = {"job_root": f"{job_root}/lost", "folder": str(war), "fallback": f"{war}/files"}
    codes = run_attempts(
        ["lightning.pytorch", "torchdata.stateful_dataloader", "flashpoint_torch.lightning"],
        2,
        fit,
        [
            {"job_root": f"{job_root}/peace", "folder": str(peace)},
            {**killed, "die_at": (rng.randrange(2), first)},
            {**killed, "steps": BATCHES},  # ends with the epoch, and so does its last version
            {**killed, "die_at": (rng.randrange(2), second)},
            killed,
        ],
    )
    assert [-9 in attempt for attempt in codes] == [False, True, False, True, False], (codes, where)
    assert codes[0] == codes[2] == codes[4] == [0, 0], (codes, where)
    for rank in range(2):
        expected = losses(peace, rank)
        assert sorted(expected) == list(range(1, STEPS + 1)), where
        assert losses(war, rank) == expected, where
        began = resumed(war, rank)
        assert began[0] == 0 and began[2] == BATCHES, (began, where)
        assert 0 < began[1] < first and BATCHES <= began[3] < second, (began, where)
        assert all(step % EVERY == 0 and step % SKIP for step in began[1:]), (began, where)

    # Memory is lost with all nodes: the trainer's own newest file is what is left.
    newest = STEPS // FILE_EVERY * FILE_EVERY
    assert run_attempts(["lightning.pytorch"], 2, fit, [stored]) == [[0, 0]]
    # A step that was trained again has been written again, under another name.
    files = [path for path in Path(war, "files").iterdir() if f"step={newest}" in path.name]
    file = max(files, key=lambda path: path.stat().st_mtime_ns)
    weights = torch.load(file, weights_only=False)["state_dict"]
    for rank in range(2):
        _, step, digest = [line for line in faults.log_lines(str(war / "log"), rank) if line[0] == "began"][
            -1
        ]
        assert (int(step), digest) == (newest, digest_of(weights))


@pytest.mark.parametrize(
    ("before", "step", "every", "skip", "due"),
    [
        (0, 1, 1, None, True),
        (3, 4, 5, None, False),
        (4, 5, 5, None, True),
        (5, 5, 5, None, False),  # a batch whose gradients are only accumulated
        (4, 6, 5, None, True),  # two optimizers count by twos
        (9, 10, 5, 10, False),
        (14, 15, 5, 10, True),
    ],
)
def test_when_a_save_is_due(before: int, step: int, every: int, skip: int | None, due: bool) -> None:
    from flashpoint_torch.lightning import is_due

    assert is_due(before, step, every, skip) is due


def test_what_is_set_wrong_is_said_at_once(job_root: str, tmp_path: Path) -> None:
    import lightning.pytorch as pl

    from flashpoint_torch.lightning import FlashpointCallback, FlashpointCheckpointIO

    memory = FlashpointCheckpointIO(job_root)
    with pytest.raises(FlashpointError, match="every_n_steps must be a whole number"):
        FlashpointCallback(memory, every_n_steps=0)
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, default_root_dir=tmp_path
    )
    with pytest.raises(FlashpointError, match=r"Trainer\(plugins=\[memory\]"):
        FlashpointCallback(memory, every_n_steps=1).setup(trainer, pl.LightningModule(), "fit")
    sharded = pl.Trainer(
        accelerator="cpu", devices=1, strategy=pl.strategies.ModelParallelStrategy(), plugins=[memory],
        logger=False, enable_checkpointing=False, default_root_dir=tmp_path,
    )  # fmt: skip
    with pytest.raises(FlashpointError, match="ModelParallelStrategy reads checkpoints by itself"):
        FlashpointCallback(memory, every_n_steps=1).setup(sharded, pl.LightningModule(), "fit")
    assert not os.listdir(job_root)


def test_one_process_saves_and_loads_by_path(job_root: str, tmp_path: Path) -> None:
    import lightning.pytorch as pl

    from flashpoint_torch.lightning import FlashpointCheckpointIO

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.layer(batch[0]).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    def trainer(steps: int) -> pl.Trainer:
        return pl.Trainer(
            accelerator="cpu", max_steps=steps, plugins=[FlashpointCheckpointIO(job_root)], logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip

    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 2)))
    first, model = trainer(2), Model()
    first.fit(model, batches)
    paths = [f"{job_root}/step-2_ckpt", f"{tmp_path}/file.ckpt"]
    for path in paths:
        first.save_checkpoint(path)
    first.strategy.checkpoint_io.teardown()
    assert Path(paths[0], ".metadata").exists() and Path(paths[1]).is_file()
    for path in [*paths, FlashpointCheckpointIO.resume]:
        again, other = trainer(2), Model()
        again.fit(other, batches, ckpt_path=path)
        assert again.global_step == 2
        assert torch.equal(other.layer.weight, model.layer.weight), path


@pytest.mark.parametrize(
    ("module", "library", "extra"),
    [
        ("lightning", "lightning", "lightning"),
        ("hf_trainer", "transformers", "huggingface"),
        ("megatron", "megatron", "megatron"),
    ],
)
def test_a_library_that_is_not_there_is_named_with_its_extra(
    module: str, library: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, f"flashpoint_torch.{module}", raising=False)
    for name in [name for name in sys.modules if name.split(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=rf"pip install flashpoint\[{extra}\]"):
        importlib.import_module(f"flashpoint_torch.{module}")
