"""`RecoverHandler`: the complete training state, saved every so often, resumed after whatever ended the run."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch
from torch import nn

from flashpoint.errors import ConfigError, FlashpointError, ManifestError
from flashpoint.handle import SaveHandle
from flashpoint.telemetry import logger
from flashpoint_torch.agreement import Cadence
from flashpoint_torch.frequency import Frequency
from flashpoint_torch.progress import StepInfo
from flashpoint_torch.session import Fallback, Flashpoint, RecoverResult
from flashpoint_torch.termination import Termination
from flashpoint_torch.training_state import Engine, EngineState, HasState, Part, RankState, Values

if TYPE_CHECKING:
    from flashpoint_torch.hf_export import Saver

MODES: Final = {"on": True, "auto": True, "off": False, "disabled": False}
SIGTERM_EXIT: Final = 128 + 15
_RESERVED: Final = ("progress", "frequency")


@dataclass(frozen=True)
class RecoverConfig:
    """When to save for recovery, and what to do after a failure.

    Attributes:
        mode: ``on`` or ``auto``: save, and resume from what there is; ``off`` or ``disabled``: neither.
        freq_epochs, freq_steps, freq_secs: save at the end of every so many epochs, at every so many steps,
            when so many seconds have passed; whichever comes first, None for never.
        retries: how often `supervise` runs the training again after a failure.
        sigterm_timeout_s: longest from SIGTERM to the end of the last save; 0 leaves SIGTERM alone.
        exit_on_sigterm: raise ``SystemExit`` after that save; otherwise `RecoverHandler.ending` tells.
        allow_world_change: resume with another number of ranks too. Weights, optimizers and progress come back;
            data loaders and generators, of which each rank has its own, stay as they are.
    """

    mode: str = "disabled"
    freq_epochs: int | None = None
    freq_steps: int | None = None
    freq_secs: float | None = None
    retries: int = 3
    sigterm_timeout_s: float = 30.0
    exit_on_sigterm: bool = True
    allow_world_change: bool = False

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"mode must be one of {', '.join(MODES)}, not {self.mode!r}")
        if type(self.retries) is not int or self.retries < 0:
            raise ConfigError(f"retries must be a whole number from 0 on, not {self.retries!r}")
        if not 0 <= self.sigterm_timeout_s < float("inf"):
            raise ConfigError(f"sigterm_timeout_s must be seconds from 0 on, not {self.sigterm_timeout_s!r}")
        self.frequency()

    @property
    def enabled(self) -> bool:
        return MODES[self.mode]

    def frequency(self, **clock: Callable[[], float]) -> Frequency:
        return Frequency(self.freq_epochs, self.freq_steps, self.freq_secs, **clock)


@dataclass(frozen=True)
class Resumed:
    """What `RecoverHandler.load` found.

    Attributes:
        last_step: the last one that is in the state.
        result: how the session recovered it.
    """

    last_step: StepInfo
    result: RecoverResult

    @property
    def next_step(self) -> StepInfo:
        """Where training goes on."""
        return self.last_step.next()


class RecoverHandler:
    """Saves and resumes everything that decides the next step, in one version.

    Every rank makes one and calls it alike.

    Args:
        fp: the job's checkpoints, as `init` opened them.
        config: when to save.
        model, optimizer, lr_scheduler, scaler: what is trained; short for ``engines={"engine": Engine(...)}``.
        engines: several of them by name, such as actor and critic.
        dataloader: torchdata's ``StatefulDataLoader``, or anything with ``state_dict`` and ``load_state_dict``.
        auxiliary: what else has a state, by name: an evaluator, a logger, a generator of your own.
        saver: exports versions for Hugging Face; its frequency is asked, and its state saved, here.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        fp: Flashpoint,
        config: RecoverConfig,
        *,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        lr_scheduler: HasState | None = None,
        scaler: HasState | None = None,
        engines: Mapping[str, Engine] | None = None,
        dataloader: HasState | None = None,
        auxiliary: Mapping[str, HasState] | None = None,
        saver: Saver | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.config = config
        self.ending = False
        self._fp = fp
        self._coordinator = fp.coordinator
        self._engines = dict(engines or {})
        if model is not None:
            self._engines["engine"] = Engine(model, optimizer, lr_scheduler, scaler)
        elif optimizer is not None or lr_scheduler is not None or scaler is not None:
            raise ConfigError("an optimizer, scheduler or scaler needs its model: give both, or engines")
        self._dataloader = dataloader
        self._auxiliary = dict(auxiliary or {})
        self._saver = saver
        self._check_parts()
        self._last: SaveHandle | None = None
        self._frequency = config.frequency(**({} if clock is None else {"clock": clock}))
        self._cadence: Cadence | None = None
        self._termination: Termination | None = None
        if config.enabled:
            self._cadence = Cadence(self._frequency, self._coordinator, fp.new_topic("recover-due"))
            if config.sigterm_timeout_s:
                self._termination = Termination(
                    self._coordinator, fp.new_topic("sigterm"), config.sigterm_timeout_s
                )
        elif saver is not None:
            raise ConfigError("a Saver exports versions: mode must be on, or hand it your own save's handle")
        # A thread that waits in the store must not meet the interpreter's end there.
        self._closing = weakref.finalize(self, _close, self._cadence, self._termination)

    def _check_parts(self) -> None:
        if not self._engines:
            raise ConfigError("there is nothing to recover: give a model, or engines")
        for name in (*self._engines, *self._auxiliary):
            if not isinstance(name, str) or not name or "." in name:
                raise ConfigError(f"{name!r} cannot name a part of the state: give a str without dots")
            if name in _RESERVED:
                raise ConfigError(f"{name!r} is taken by the handler: give that part another name")
        parts: dict[str, Any] = {f"auxiliary {name!r}": part for name, part in self._auxiliary.items()}
        for name, engine in self._engines.items():
            parts |= {
                f"the lr_scheduler of {name!r}": engine.lr_scheduler,
                f"the scaler of {name!r}": engine.scaler,
            }
        parts["the dataloader"] = self._dataloader
        for name, part in parts.items():
            if part is not None and not isinstance(part, HasState):
                raise ConfigError(
                    f"{name}, a {type(part).__name__}, has no state_dict and load_state_dict: without them its state "
                    "would be lost (for a data loader, take torchdata's StatefulDataLoader)"
                )

    # ---- saving ---------------------------------------------------------------------------------

    def dump(self, step: StepInfo, *, force: bool = False) -> SaveHandle | None:
        """Save, if it is time to; call it after every step, on every rank.

        Args:
            step: the step that was just done.
            force: save in any case, such as after the last step.

        Returns:
            The handle of the save, or None where there was none. As with `Flashpoint.async_save`, training may go
            on; a save that the machine could not make fails in the handle, with a warning.

        Raises:
            SystemExit: after the save that follows SIGTERM.
            FlashpointError: a state that cannot be saved.
        """
        if self._cadence is None:
            return None
        ending = self._termination is not None and self._termination.reached(step.global_step)
        self.ending |= ending
        due = self._cadence.due(step)
        exports = self._saver is not None and self._saver.due(step)
        if not (due or ending or exports or force):
            return None
        handle = self._save(step)
        if exports and self._saver is not None and handle is not None:
            self._saver.export(step, handle)
        if ending:
            self._end(handle)
        return handle

    def _save(self, step: StepInfo) -> SaveHandle | None:
        if self._last is not None and self._last.step == step.global_step and self._last.error is None:
            return self._last
        for name, engine in self._engines.items():
            if not engine.can_be_saved:
                logger.warning(
                    "step %d is not saved: the sharded optimizer of %r has no state before its first step",
                    step.global_step, name,
                )  # fmt: skip
                return None
        state = self._state(step)
        self._last = handle = self._fp.async_save(state, step.global_step)
        return handle

    def _end(self, handle: SaveHandle | None) -> None:
        assert self._termination is not None
        moment = "replicated" if self._fp.config.copies else "complete"  # this node's memory may go with it
        saved = handle is not None and handle.wait(moment, timeout_s=self._termination.left_s)
        if saved and handle is not None:
            logger.warning("SIGTERM: step %d is %s", handle.step, moment)
        else:
            error = handle.error if handle is not None else None
            logger.error("SIGTERM: the last step is not %s: %s", moment, error or "the time is up")
        if self.config.exit_on_sigterm:
            raise SystemExit(SIGTERM_EXIT)

    # ---- resuming -------------------------------------------------------------------------------

    def load(self, *, fallback: Fallback | None = None) -> Resumed | None:
        """Put everything back to where the newest version has it; on every rank, before training.

        Call it when all parts are made, and before an iterator is taken from the data loader.

        Args:
            fallback: as for `Flashpoint.recover`, where memory has nothing.

        Returns:
            What was found; None only where no node has, or ever kept, a version, and in mode off.

        Raises:
            MismatchError: a part does not fit what was saved; the message names the first ten differences.
            FlashpointError: there is a version, but it cannot be restored; the state may be half of it.
        """
        if not self.config.enabled:
            return None
        saved_world, had = self._look()
        world = self._coordinator.world_size
        if saved_world not in (0, world) and not self.config.allow_world_change:
            raise FlashpointError(
                f"the newest version in {self._fp.job_root} was saved by {saved_world} ranks, the job has {world}: "
                "data loaders and generators are each rank's own and cannot be put back; start as many ranks, or set "
                "allow_world_change and seed and place them yourself"
            )
        state = self._state(None, saved_world=saved_world or world)
        result = self._fp.recover(state, fallback=fallback)
        if result is None:
            if had:
                raise FlashpointError(
                    f"{self._fp.job_root} holds versions, but none that every rank can use (see the warnings above); "
                    "delete it to start from scratch, or give a fallback"
                )
            return None
        try:
            last = StepInfo(**state["progress"].values)
        except TypeError as error:
            raise FlashpointError(f"the version's progress is not that of a step: {error}") from None
        resumed = Resumed(last, result)
        logger.info("training resumes at step %d", resumed.next_step.global_step)
        return resumed

    def _look(self) -> tuple[int, bool]:
        """How many ranks saved the newest version that any node has, and whether there is anything at all."""
        objects = self._fp.objects
        newest, versions = (-1, -1, 0), objects.complete_versions()
        if versions:
            try:
                record = objects.read_summary(objects.container(versions[0].step)).record
                newest = (record.epoch, record.step, record.world_size)
            except (ManifestError, FileNotFoundError):  # it does not serve, but it was there
                pass
        had = bool(versions or objects.garbled_steps())
        answers = self._coordinator.all_gather(
            self._fp.new_topic("look"),
            msgspec.msgpack.encode((newest, had)),
            self._fp.config.recovery_timeout_s,
        )
        found = [msgspec.msgpack.decode(answer) for answer in answers]
        return max(one[0] for one in found)[2], any(one[1] for one in found)

    # ---- the state ------------------------------------------------------------------------------

    def _state(self, step: StepInfo | None, *, saved_world: int | None = None) -> dict[str, Any]:
        """What is saved after ``step``, or, without one, what is filled."""
        loading = step is None
        world = self._coordinator.world_size
        state: dict[str, Any] = {
            name: EngineState(engine, loading=loading) for name, engine in self._engines.items()
        }
        for name, part in self._auxiliary.items():
            state[f"auxiliary_{name}"] = Part(part, loading=loading)
        if self._saver is not None:
            state["saver"] = Part(self._saver, loading=loading)
        state["frequency"] = Part(self._frequency, loading=loading)
        state["progress"] = Values((step or StepInfo.first(1)).as_dict())
        # Last, since to restore other parts may throw dice. The world's size is part of the name, so that what a
        # rank of one world was doing is never taken for what a rank of another should.
        ranks = world if saved_world is None else saved_world
        state[f"of_{ranks}_ranks"] = RankState(self._dataloader, loading=loading, ignored=ranks != world)
        return state

    # ---- life -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Catch no more signals; the session stays open."""
        self._closing()

    def __enter__(self) -> RecoverHandler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _close(cadence: Cadence | None, termination: Termination | None) -> None:
    for part in (cadence, termination):
        if part is not None:
            part.close()
