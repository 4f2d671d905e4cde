"""NeMo's `AutoResume`, asked after memory.

    memory = FlashpointCheckpointIO("/dev/shm/job-1")
    resume = FlashpointAutoResume(memory, nl.AutoResume(resume_if_exists=True, resume_ignore_no_checkpoint=True))
    resume.setup(trainer, model)  # or llm.train(..., resume=resume)
    trainer.fit(model)

Nothing of NeMo is imported: what is wrapped is anything with ``setup(trainer, model)`` that sets ``trainer.ckpt_path``.
"""

from __future__ import annotations

from typing import Any

from flashpoint_torch.lightning import FlashpointCheckpointIO


class FlashpointAutoResume:
    """Resumes from the newest step in memory, and where there is none from what the wrapped object chooses.

    Attributes that are not its own are those of the wrapped object.

    Args:
        memory: the plug-in that the trainer has too; its fallback becomes what the wrapped object chooses.
        resume: NeMo's `AutoResume`. One whose ``resume_if_exists`` is false means a run that begins anew: then memory
            is not asked either. None: memory, or from scratch.
    """

    def __init__(self, memory: FlashpointCheckpointIO, resume: Any = None) -> None:
        self.memory = memory
        self.resume = resume

    def setup(self, trainer: Any, model: Any = None) -> None:
        """As `AutoResume.setup`; before ``trainer.fit``, on every rank. Which it is, is decided as training begins.

        Raises:
            Whatever the wrapped object raises: NeMo's, that there is no checkpoint, without
            ``resume_ignore_no_checkpoint``.
        """
        if self.resume is not None:
            self.resume.setup(trainer, model)
            if not getattr(self.resume, "resume_if_exists", True):
                return
        chosen = trainer.ckpt_path
        if chosen != self.memory.resume:  # it may be set up twice
            self.memory.fallback = chosen
        trainer.ckpt_path = self.memory.resume

    def __getattr__(self, name: str) -> Any:
        if name == "resume":  # while it is being unpickled
            raise AttributeError(name)
        return getattr(self.resume, name)
