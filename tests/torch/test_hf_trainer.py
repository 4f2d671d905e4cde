"""Real training under Hugging Face's Trainer, killed and resumed."""

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from flashpoint.errors import FlashpointError, MismatchError
from tests.torch import faults
from tests.torch.trainers import die, losses, resumed, run_attempts

pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install flashpoint[huggingface]"
)
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install flashpoint[huggingface]")

BATCHES, EPOCHS = 8, 3  # optimizer steps of an epoch
STEPS = BATCHES * EPOCHS
EVERY, SKIP = 2, 22


class Texts(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return BATCHES * 2 * 2 * 2 - 3

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(12) * (i + 1)) % 61
        return {"input_ids": tokens, "labels": tokens}


def make_trainer(folder: str, memory: Any, *, steps: int = -1, width: int = 16, **changes: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    config = GPT2Config(vocab_size=61, n_positions=16, n_embd=width, n_layer=1, n_head=2)
    torch.manual_seed(5)
    arguments: dict[str, Any] = {
        "output_dir": f"{folder}/files",
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": EPOCHS,
        "max_steps": steps,
        "learning_rate": 1e-2,
        "warmup_steps": 3,
        "lr_scheduler_type": "cosine",
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 11,
        **changes,
    }
    return type("Logged", (Trainer,), {"compute_loss": _logged_loss})(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(**arguments),
        train_dataset=Texts(),
        eval_dataset=torch.utils.data.Subset(Texts(), range(4)),
        callbacks=[memory],
    )


def _logged_loss(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """One batch's loss into the log, under the number of the batch."""
    loss = super(type(self), self).compute_loss(model, inputs, *args, **kwargs)
    if model.training:
        number = 2 * self.state.global_step + self.batch % 2
        self.batch += 1
        if self.die_at == self.state.global_step + 1:
            if self.dies_after_save:
                self.memory.session.wait(60)
            deadline = time.monotonic() + 60
            while not self.memory.session.steps() and time.monotonic() < deadline:
                time.sleep(0.01)
            die()
        value = loss[0] if isinstance(loss, tuple) else loss
        self.log_file.write("loss", number, value.item().hex())
    return loss


def fit(
    rank: int,
    *,
    job_root: str,
    folder: str,
    die_at: tuple[int, int] | None = None,
    dies_after_save: bool = False,
    **changes: Any,
) -> None:
    """Train on one of two ranks.

    Args:
        die_at: a rank and the step in which it kills itself, once some version is complete.
        dies_after_save: when the save that runs then is done.
    """
    from flashpoint_torch.hf_trainer import FlashpointTrainerCallback

    torch.use_deterministic_algorithms(True)
    memory = FlashpointTrainerCallback(job_root, every_n_steps=EVERY, skip_every_n_steps=SKIP, keep=1)
    trainer = make_trainer(folder, memory, **changes)
    trainer.log_file, trainer.batch, trainer.memory = faults.Log(f"{folder}/log.{rank}"), 0, memory
    trainer.dies_after_save = dies_after_save
    trainer.die_at = die_at[1] if die_at is not None and die_at[0] == rank else None
    path = memory.resume(trainer)
    trainer.log_file.write("began", 0 if path is None else path.rsplit("-", 1)[1], path)
    trainer.train(resume_from_checkpoint=path)
    history = [{k: v for k, v in line.items() if "per_second" not in k and "runtime" not in k}
               for line in trainer.state.log_history[:-1]]  # fmt: skip
    Path(folder, f"history.{rank}").write_text(json.dumps(history, sort_keys=True))
    assert path is None or path.startswith(folder) or not os.path.exists(path)


def test_losses_after_kills_are_those_of_the_uninterrupted_run(job_root: str, tmp_path: Path) -> None:
    rng = random.Random()
    first, second = rng.randrange(EVERY + 2, BATCHES + 1), rng.randrange(BATCHES + 3, STEPS)
    where = f"killed in steps {first} and {second}"
    peace, war = tmp_path / "peace", tmp_path / "war"
    for folder in (peace, war):
        folder.mkdir()
    killed = {"job_root": f"{job_root}/war", "folder": str(war)}
    codes = run_attempts(
        ["transformers.trainer", "transformers.models.gpt2", "flashpoint_torch.hf_trainer"],
        2,
        fit,
        [
            {"job_root": f"{job_root}/peace", "folder": str(peace)},
            {**killed, "die_at": (rng.randrange(2), first)},
            {**killed, "die_at": (rng.randrange(2), BATCHES + 2), "dies_after_save": True},
            {**killed, "die_at": (rng.randrange(2), second)},
            killed,
        ],
    )
    assert [-9 in attempt for attempt in codes] == [False, True, True, True, False], (codes, where)
    assert codes[0] == codes[4] == [0, 0], (codes, where)
    for rank in range(2):
        expected = losses(peace, rank)
        assert sorted(expected) == list(range(2 * STEPS)), where
        assert losses(war, rank) == expected, where
        began = resumed(war, rank)
        assert began[0] == 0 and 0 < began[1] < first, (began, where)
        assert began[2] == BATCHES <= began[3] < second, (began, where)
        assert all(step % EVERY == 0 and step % SKIP for step in began[1:]), (began, where)
        # What the trainer logged, its evaluations too, is whole: each line once.
        assert Path(war, f"history.{rank}").read_text() == Path(peace, f"history.{rank}").read_text()


def test_without_memory_the_trainers_own_checkpoint_is_taken(job_root: str, tmp_path: Path) -> None:
    from flashpoint_torch.hf_trainer import FlashpointTrainerCallback

    memory = FlashpointTrainerCallback(job_root, every_n_steps=100)
    trainer = make_trainer(str(tmp_path), memory, steps=2, save_strategy="steps", save_steps=2)
    trainer.log_file, trainer.batch, trainer.die_at = faults.Log(tmp_path / "log.0"), 0, None
    assert memory.resume(trainer) is None
    trainer.train()
    assert memory.resume(trainer) == f"{tmp_path}/files/checkpoint-2"
    assert memory.resume(trainer, fallback=False) is None
    memory.session.close()


def test_a_model_that_does_not_fit_is_an_error(job_root: str, tmp_path: Path) -> None:
    from flashpoint_torch.hf_trainer import FlashpointTrainerCallback

    memory = FlashpointTrainerCallback(job_root, every_n_steps=1)
    with pytest.raises(FlashpointError, match="memory.resume"):
        make_trainer(str(tmp_path), memory, steps=1).train()
    trainer = make_trainer(str(tmp_path), memory, steps=1)
    trainer.log_file, trainer.batch, trainer.die_at = faults.Log(tmp_path / "log.0"), 0, None
    trainer.train(resume_from_checkpoint=memory.resume(trainer))
    wider = make_trainer(str(tmp_path), memory, steps=1, width=32)
    with pytest.raises(MismatchError, match=r"wte.weight' is \(61, 32\) .*saved as \(61, 16\)"):
        memory.resume(wider)
    memory.session.close()
