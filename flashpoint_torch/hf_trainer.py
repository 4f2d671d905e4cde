"""Flashpoint under Hugging Face's ``Trainer``: a callback that saves, and a helper that resumes.

    memory = FlashpointTrainerCallback("/dev/shm/job-1", every_n_steps=10, keep=1)
    trainer = Trainer(..., callbacks=[memory])
    trainer.train(resume_from_checkpoint=memory.resume(trainer))

The trainer resumes from folders only. So what is recovered is written as one of its checkpoint folders beside the
job root, in memory too, where it stays until the first step is done.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from flashpoint.errors import FlashpointError, MismatchError
from flashpoint.telemetry import logger
from flashpoint_torch.packed import pack, recover_packed
from flashpoint_torch.session import Flashpoint, init
from flashpoint_torch.training_state import rng_state, set_rng_state

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer import OPTIMIZER_NAME, SCALER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
    from transformers.trainer_callback import ExportableState
    from transformers.trainer_utils import get_last_checkpoint
    from transformers.utils import WEIGHTS_NAME
except ImportError as error:
    raise ImportError(f"{error}: install transformers with `pip install flashpoint[huggingface]`") from error

_FOLDER: Final = "resume"  # the job root's name with this after it


class FlashpointTrainerCallback(TrainerCallback):
    """Saves the trainer's whole state into memory, and resumes from there.

    A step is saved when all that belongs to it is done, its log and its evaluation too: as the next step begins,
    once its batch is fetched, since that is when the trainer puts generators back.

    Args:
        job_root: as `flashpoint_torch.init` takes it.
        every_n_steps: optimizer steps from one save to the next.
        skip_every_n_steps: save nothing at multiples of this: the trainer's own checkpoint is written there.
        settings: fields of `flashpoint.FlashpointConfig`.
    """

    def __init__(
        self,
        job_root: str | os.PathLike[str],
        *,
        every_n_steps: int,
        skip_every_n_steps: int | None = None,
        **settings: Any,
    ) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("skip_every_n_steps", skip_every_n_steps)):
            if value is not None and (type(value) is not int or value < 1):
                raise FlashpointError(f"{name} must be a whole number from 1 on, not {value!r}")
        self.job_root = os.fspath(job_root).rstrip("/")
        self._every, self._skip = every_n_steps, skip_every_n_steps
        self._settings = settings
        self._session: Flashpoint | None = None
        self._trainer: Trainer | None = None
        self._due = False
        self._folder: str | None = None  # to be removed after the first step

    @property
    def session(self) -> Flashpoint:
        """The job's session; opened at first use, on all ranks at once."""
        if self._session is None:
            self._session = init(self.job_root, **self._settings)
        return self._session

    def resume(self, trainer: Trainer, *, fallback: bool | str | os.PathLike[str] = True) -> str | None:
        """What to give ``trainer.train(resume_from_checkpoint=..)``; call it on every rank, just before.

        Args:
            fallback: where memory has nothing: True, the newest checkpoint in the trainer's ``output_dir``; a
                checkpoint's path; or False. Rank 0 decides for all.

        Returns:
            A checkpoint's folder; None to start from scratch, where there is nothing at all.
        """
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            raise FlashpointError(
                "under FSDP and DeepSpeed the trainer saves shards by itself: save them with "
                "flashpoint_torch.init(...) in a callback of your own"
            )
        if hasattr(_model(trainer), "peft_config"):
            raise FlashpointError("a PEFT model is not supported: the trainer resumes one from adapters only")
        self._trainer = trainer
        stored = self._stored(trainer, fallback)
        found = recover_packed(self.session, fallback=(lambda: (None, None)) if stored else None)
        if found is None or found.tree is None:
            logger.info("memory holds no checkpoint: %s", stored or "training starts from scratch")
            return stored
        return self._write(trainer, found.tree, own=found.own)

    @staticmethod
    def _stored(trainer: Trainer, fallback: bool | str | os.PathLike[str]) -> str | None:
        chosen: list[str | None] = [None]
        if trainer.args.process_index == 0 and fallback is not False:
            if fallback is not True:
                chosen = [os.fspath(fallback)]
            elif os.path.isdir(trainer.args.output_dir or ""):
                chosen = [get_last_checkpoint(trainer.args.output_dir)]  # type: ignore[no-untyped-call]
        if dist.is_initialized():
            dist.broadcast_object_list(chosen, src=0)
        return chosen[0]

    def _write(self, trainer: Trainer, tree: dict[str, Any], *, own: bool) -> str:
        """The checkpoint folder that the trainer would have written, in this node's memory."""
        parent = f"{self.job_root}.{_FOLDER}"
        folder = self._folder = f"{parent}/checkpoint-{tree['step']}"
        error: Exception | None = None
        try:
            _check_model(_model(trainer).state_dict(), tree["model"])
            if trainer.args.local_process_index == 0:
                shutil.rmtree(parent, ignore_errors=True)
                os.makedirs(folder, mode=0o700)
                _write_folder(folder, tree)
        except Exception as failure:  # whatever files may do; no rank is to wait for one that gave up
            error = failure
        self.session.agree("resume", error)
        if own:
            here = rng_state()
            set_rng_state(tree["rng"])
            trainer._save_rng_state(folder)
            set_rng_state(here)
        return folder

    # ---- events ---------------------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._trainer is None:
            raise FlashpointError("resume this callback first: trainer.train(memory.resume(trainer))")
        self._due = False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        step = state.global_step
        self._due = step % self._every == 0 and (self._skip is None or step % self._skip != 0)
        if self._folder is not None:  # every rank has read it: a step is done together
            if args.local_process_index == 0:
                shutil.rmtree(os.path.dirname(self._folder), ignore_errors=True)
            self._folder = None

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._save_if_due(state)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._save_if_due(state)  # before the epoch's iterator throws dice: there it is put back, too

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._save_if_due(state)
        if self._session is not None:
            session, self._session = self._session, None
            session.close()

    def _save_if_due(self, state: TrainerState) -> None:
        if not self._due:
            return
        self._due = False
        trainer = self._trainer
        assert trainer is not None and trainer.optimizer is not None and trainer.lr_scheduler is not None
        scaler = getattr(trainer.accelerator, "scaler", None)
        tree = {
            "step": state.global_step,
            "model": _model(trainer).state_dict(),
            "optimizer": trainer.optimizer.state_dict(),
            "scheduler": trainer.lr_scheduler.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "trainer": _json_of(trainer, state),
            "rng": rng_state(),
        }
        self.session.async_save(pack(tree), state.global_step, overwrite=True)


def _write_folder(folder: str, tree: dict[str, Any]) -> None:
    names = {
        "model": WEIGHTS_NAME,
        "optimizer": OPTIMIZER_NAME,
        "scheduler": SCHEDULER_NAME,
        "scaler": SCALER_NAME,
    }
    for part, name in names.items():
        if tree[part] is not None:
            torch.save(tree[part], f"{folder}/{name}")
    Path(folder, TRAINER_STATE_NAME).write_text(tree["trainer"], encoding="utf-8")


def _json_of(trainer: Trainer, state: TrainerState) -> str:
    """What the trainer writes to its ``trainer_state.json``, callbacks that have a state included."""
    handler = trainer.callback_handler
    parts: dict[str, Any] = {}
    for part in [*handler.callbacks, trainer.control]:
        if isinstance(part, ExportableState):
            parts.setdefault(type(part).__name__, []).append(part.state())
    named = {name: part[0] if len(part) == 1 else part for name, part in parts.items()}
    return json.dumps({**dataclasses.asdict(state), "stateful_callbacks": named}, sort_keys=True) + "\n"


def _model(trainer: Trainer) -> Any:
    return trainer.accelerator.unwrap_model(trainer.model)


def _check_model(here: dict[str, torch.Tensor], saved: dict[str, torch.Tensor]) -> None:
    """The trainer only warns of weights that do not fit."""
    found = [f"{name!r} is not in the model" for name in saved if name not in here]
    for name, tensor in here.items():
        if name not in saved:
            found.append(f"{name!r} was not saved")
        elif saved[name].shape != tensor.shape or saved[name].dtype != tensor.dtype:
            was = f"{tuple(saved[name].shape)} {saved[name].dtype}"
            found.append(f"{name!r} is {tuple(tensor.shape)} {tensor.dtype}, saved as {was}")
    if found:
        shown = "\n  ".join(found[:10])
        raise MismatchError(
            f"the model does not fit the checkpoint in {len(found)} places:\n  {shown}\n"
            "build it as it was, or give a job root of another name to start anew"
        )
