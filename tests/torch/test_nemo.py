"""NeMo's way to resume, under lightning's real Trainer: memory first, then what `AutoResume` finds.

NeMo itself is not here: `AutoResume` stands for it, with the interface that nemo_toolkit 2.7.3 has in
`nemo.lightning.resume` (`setup(trainer, model)`, which sets `trainer.ckpt_path`, and its settings).
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.torch import faults
from tests.torch.trainers import die, losses, resumed, run_attempts

pytest.importorskip(
    "lightning.pytorch", reason="lightning is not installed: pip install flashpoint[lightning]"
)

pytest.importorskip("torchdata", reason="torchdata is not installed: its loaders have a state")

STEPS, EVERY, FILE_EVERY = 12, 2, 5


class AutoResume:
    """What NeMo's does with a folder of checkpoints."""

    def __init__(self, folder: str, *, resume_if_exists: bool = True, ignore: bool = True) -> None:
        self.resume_from_directory = folder
        self.resume_if_exists = resume_if_exists
        self.resume_ignore_no_checkpoint = ignore

    def setup(self, trainer: Any, model: Any = None) -> None:
        path = self.get_trainer_ckpt_path(model)
        if path:
            trainer.ckpt_path = path
            trainer.checkpoint_callback.last_model_path = path

    def get_trainer_ckpt_path(self, model: Any = None) -> Path | None:
        found = sorted(Path(self.resume_from_directory).glob("*.ckpt")) if self.resume_if_exists else []
        if self.resume_if_exists and not found and not self.resume_ignore_no_checkpoint:
            raise FileNotFoundError("There were no checkpoints found in checkpoint_dir")
        return found[-1] if found else None


def fit(
    rank: int,
    *,
    job_root: str,
    folder: str,
    files: str,
    die_at: int = 0,
    steps: int = STEPS,
    resume_if_exists: bool = True,
) -> None:
    """Train; ``folder`` is for the log, ``files`` for the trainer's own checkpoints."""
    import lightning.pytorch as pl
    from torchdata.stateful_dataloader import StatefulDataLoader

    from flashpoint_torch.lightning import FlashpointCallback, FlashpointCheckpointIO
    from flashpoint_torch.nemo import FlashpointAutoResume

    log = faults.Log(f"{folder}/log.0")

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            if self.global_step + 1 == die_at:
                assert memory.session.wait(60)
                die()
            loss = (self.layer(torch.nn.functional.dropout(batch, 0.3)) - 1).square().mean()
            log.write("loss", self.global_step + 1, loss.item().hex())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

        def on_train_start(self) -> None:
            log.write("began", self.global_step)

    pl.seed_everything(7, verbose=False)
    model = Model()
    memory = FlashpointCheckpointIO(job_root, keep=1)
    stored = pl.callbacks.ModelCheckpoint(
        dirpath=files, every_n_train_steps=FILE_EVERY, save_top_k=-1, filename="{step:03d}"
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        plugins=[memory],
        callbacks=[FlashpointCallback(memory, every_n_steps=EVERY), stored],
    )
    wrapped = AutoResume(files, resume_if_exists=resume_if_exists)
    auto = FlashpointAutoResume(memory, wrapped)
    assert auto.resume_from_directory == wrapped.resume_from_directory
    auto.setup(trainer, model)
    auto.setup(trainer, model)
    batches = torch.arange(STEPS * 8.0).view(STEPS, 1, 8) / 50
    trainer.fit(model, StatefulDataLoader(list(batches), batch_size=None))


def test_memory_comes_first_and_then_what_auto_resume_finds(job_root: str, tmp_path: Path) -> None:
    def attempt(name: str, files: str, **settings: Any) -> dict[str, Any]:
        """A start of the job of this name, whose memory and log are its own."""
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        return {
            "job_root": f"{job_root}/{name}",
            "folder": str(folder),
            "files": str(tmp_path / files),
            **settings,
        }

    codes = run_attempts(
        ["lightning.pytorch", "torchdata.stateful_dataloader", "flashpoint_torch.nemo"],
        1,
        fit,
        [
            attempt("peace", "files of peace"),
            attempt("war", "files", die_at=8),
            attempt("war", "files"),
            attempt("lost", "files", steps=STEPS + 1),  # other memory: AutoResume's file is what is left
            attempt("lost", "files", steps=STEPS + 1),
            attempt("anew", "files", steps=1, resume_if_exists=False),
        ],
    )
    assert codes == [[0], [-9], [0], [0], [0], [0]]
    assert resumed(tmp_path / "war", 0) == [0, 6]  # in memory; the newest file is of step 5
    expected = losses(tmp_path / "peace", 0)
    assert sorted(expected) == list(range(1, STEPS + 1))
    assert losses(tmp_path / "war", 0) == expected
    assert resumed(tmp_path / "lost", 0) == [STEPS // FILE_EVERY * FILE_EVERY, STEPS]
    assert resumed(tmp_path / "anew", 0) == [0]


def test_what_auto_resume_raises_is_raised(tmp_path: Path) -> None:
    from flashpoint_torch.lightning import FlashpointCheckpointIO
    from flashpoint_torch.nemo import FlashpointAutoResume

    auto = FlashpointAutoResume(
        FlashpointCheckpointIO("/dev/shm/job"), AutoResume(str(tmp_path), ignore=False)
    )
    with pytest.raises(FileNotFoundError, match="no checkpoints found"):
        auto.setup(None)
