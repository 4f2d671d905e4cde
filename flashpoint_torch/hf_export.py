"""`Saver`: models in Hugging Face's format, made of versions that already lie in memory."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from flashpoint.config import parse_bytes
from flashpoint.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptObjectError,
    DeadlineError,
    FlashpointError,
    reason_of,
)
from flashpoint.export.folder import drop_unfinished, write_folder
from flashpoint.export.safetensors_files import plan_files
from flashpoint.handle import SaveHandle
from flashpoint.telemetry import count, logger
from flashpoint.view import CheckpointView
from flashpoint_torch.agreement import Cadence
from flashpoint_torch.dtypes import NAMES
from flashpoint_torch.frequency import Frequency
from flashpoint_torch.hf_folder import Source
from flashpoint_torch.progress import StepInfo
from flashpoint_torch.session import Flashpoint

MODES: Final = ("auto", "sync", "async")
QUEUE_MAX: Final = 2  # exports under way; each holds the version that it is made of
NICENESS: Final = 10
_TOKENIZER_FILES: Final = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja",
)  # fmt: skip


@dataclass(frozen=True)
class SaverConfig:
    """When to export, and how.

    Attributes:
        mode: ``async``, and so ``auto``: in the background, while training goes on. ``sync``: rank 0 waits for it.
        timeout_s: with ``sync``, longest that rank 0 waits for one export; then it goes on in the background.
        freq_epochs, freq_steps, freq_secs: as for recovery, and apart from it.
        max_shard_bytes: of one file, such as ``"5GiB"``.
        dtype: to which floating-point tensors are cast; None leaves each as it is.
        wait_s: longest that an export waits for its version to be complete, for copies of other nodes' objects, and
            for the export before it.
    """

    mode: str = "auto"
    freq_epochs: int | None = None
    freq_steps: int | None = None
    freq_secs: float | None = None
    max_shard_bytes: int | str = 5 << 30
    dtype: torch.dtype | None = None
    wait_s: float = 600.0
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"mode must be one of {', '.join(MODES)}, not {self.mode!r}")
        if self.dtype is not None and (self.dtype not in NAMES or not self.dtype.is_floating_point):
            raise ConfigError(f"dtype must be a floating-point dtype of torch, not {self.dtype!r}")
        for name in ("wait_s", "timeout_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(
                    f"{name} must be a positive, finite number of seconds, not {getattr(self, name)!r}"
                )
        if self.shard_bytes < 1:
            raise ConfigError(f"max_shard_bytes must be at least 1, not {self.max_shard_bytes!r}")
        self.frequency()

    @property
    def shard_bytes(self) -> int:
        try:
            size = self.max_shard_bytes
            return parse_bytes(size) if isinstance(size, str) else int(size)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"max_shard_bytes={self.max_shard_bytes!r}: {error}") from None

    def frequency(self, **clock: Callable[[], float]) -> Frequency:
        return Frequency(self.freq_epochs, self.freq_steps, self.freq_secs, **clock)


class Export:
    """One export under way.

    Attributes:
        path: where it will lie.
        error: why it does not; None otherwise. A `DeadlineError` of one that rank 0 waits for no longer goes when it
            has come to its end after all.
        seconds: that writing took, once it is done.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.error: Exception | None = None
        self.seconds = 0.0
        self._ended = threading.Event()
        self._lock = threading.Lock()

    def done(self) -> bool:
        """Whether it lies there, whole."""
        return self._ended.is_set() and self.error is None

    def wait(self, timeout_s: float = 600.0) -> bool:
        """Wait for its end; False when it failed, or has not ended within ``timeout_s``."""
        return self._ended.wait(timeout_s) and self.error is None

    def end(self, error: Exception | None = None) -> None:
        with self._lock:
            self.error = error
            self._ended.set()

    def overdue(self, error: Exception) -> bool:
        """It is not waited for any longer; False if it has ended this very moment."""
        with self._lock:
            if not self._ended.is_set():
                self.error = error
            return not self._ended.is_set()


class Saver:
    """Exports a model's weights from versions in memory: training pays for nothing but the version.

    Every rank makes one and calls it alike; rank 0 writes, streaming: a slab of a tensor at a time. A
    `RecoverHandler` that is given it does the calling.

    Args:
        fp: the job's checkpoints.
        root: folder below which each export gets its own, ``epoch{E}epochstep{S}globalstep{G}``.
        config: when to export, and how.
        model: its configuration, its generation configuration and its tied weights are taken, where it has them.
        model_config: configuration instead: an object of Transformers, a dict, or the path of a ``config.json``.
        tokenizer: an object of Transformers, or the path of a folder with a tokenizer's files.
        prefix: what comes before the model's own names in the saved state: of `RecoverHandler`, the engine's name
            and ``.model.``.
        rename: from the model's names to those of the export; None leaves a tensor out.
        clock: seconds that never go back.

    Raises:
        ConfigError: there is no configuration, or no tokenizer where it should be.
    """

    def __init__(
        self,
        fp: Flashpoint,
        root: str | os.PathLike[str],
        config: SaverConfig | None = None,
        *,
        model: nn.Module | None = None,
        model_config: Any = None,
        tokenizer: Any = None,
        prefix: str = "engine.model.",
        rename: Callable[[str], str | None] | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.config = config = config or SaverConfig()
        self.errors: list[str] = []
        self._fp = fp
        self._coordinator = fp.coordinator
        self._root = os.path.abspath(root)
        self._prefix = prefix
        self._rename = rename or (lambda name: name)
        self._tied = _tied_names(model) if model is not None else frozenset()
        self._model_config = _model_config(model, model_config)
        self._extras = _tokenizer_files(tokenizer) | _generation_config(model)
        self._frequency = config.frequency(**({} if clock is None else {"clock": clock}))
        self._cadence = Cadence(self._frequency, self._coordinator, fp.new_topic("saver-due"))
        self._writing = threading.Lock()  # one export writes; another may hold its version meanwhile
        self._running: list[tuple[threading.Thread, Export]] = []
        self._stop = threading.Event()
        self._closing = weakref.finalize(self, self._cadence.close)
        if self._coordinator.is_leader:
            try:
                os.makedirs(self._root, exist_ok=True)
                drop_unfinished(self._root)
            except OSError as error:
                raise ConfigError(
                    f"the export folder {self._root!r} cannot be used: {error.strerror}"
                ) from error

    # ---- when -----------------------------------------------------------------------------------

    def due(self, step: StepInfo) -> bool:
        """Whether this step is to be exported; called once a step, on every rank."""
        return self._cadence.due(step)

    def state_dict(self) -> dict[str, Any]:
        return self._frequency.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._frequency.load_state_dict(state)

    # ---- exporting ------------------------------------------------------------------------------

    def path(self, step: StepInfo) -> str:
        return f"{self._root}/epoch{step.epoch}epochstep{step.epoch_step}globalstep{step.global_step}"

    def export(self, step: StepInfo, handle: SaveHandle) -> Export | None:
        """Export the version of ``handle``, as soon as it is complete.

        What fails is told in the export, in `errors` and in the log; it never stops training. So is an export that
        has not ended within ``timeout_s``, where rank 0 waits for it: it goes on in the background, and while it does,
        others are skipped.

        Returns:
            The export on rank 0, None on others.
        """
        if not self._coordinator.is_leader:
            return None
        export = Export(self.path(step))
        self._running = [one for one in self._running if one[0].is_alive()]
        waits = self.config.mode == "sync"
        # Where rank 0 waits, what still runs is overdue: to wait for another behind it would be to wait in vain.
        if len(self._running) >= (1 if waits else QUEUE_MAX):
            under_way = " and ".join(one.path for _, one in self._running)
            self._failed(export, FlashpointError(f"{under_way} under way already: this one is skipped"))
            return export
        # Daemons: a process that ends early leaves a temporary folder, which the next one deletes.
        thread = threading.Thread(
            target=self._run, args=(export, handle), name="flashpoint-export", daemon=True
        )
        self._running.append((thread, export))
        thread.start()
        if waits:
            thread.join(self.config.timeout_s)
            if thread.is_alive():
                self._overdue(export, handle.step)
        return export

    def wait(self, timeout_s: float = 600.0) -> bool:
        """Wait until no export is under way; False if one still is after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        for thread, _ in self._running:
            thread.join(max(deadline - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread, _ in self._running)

    def close(self, timeout_s: float = 600.0) -> None:
        """Finish what is under way; after ``timeout_s`` it is given up."""
        finished = self.wait(timeout_s)
        self._stop.set()
        if not finished:
            self.wait(timeout_s)
        self._closing()

    def _run(self, export: Export, handle: SaveHandle) -> None:
        with contextlib.suppress(OSError):  # of this thread and of those that it starts
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            source = self._open(handle)
            try:
                self._wait_for_turn()
                try:
                    start_s = time.perf_counter()
                    self._write(export, source)
                    export.seconds = time.perf_counter() - start_s
                finally:
                    self._writing.release()
            finally:
                source.close()
        except Exception as error:  # the job trains on, whatever became of its export
            self._failed(export, error)
            return
        count("exports_complete")
        logger.info("step %d is exported to %s", handle.step, export.path)
        export.end()

    def _wait_for_turn(self) -> None:
        """Until no other export writes; to be released."""
        if not self._writing.acquire(timeout=self.config.wait_s):
            raise DeadlineError(
                f"the export before it still writes after {self.config.wait_s:g} s: does {self._root} hang?"
            )

    def _overdue(self, export: Export, step: int) -> None:
        error = DeadlineError(
            f"step {step} is not exported to {export.path} after {self.config.timeout_s:g} s: training goes on, and so "
            "does the export, in the background; others are skipped until it has ended. See whether the disk hangs, or "
            "raise timeout_s"
        )
        if export.overdue(error):
            count("exports_overdue")
            self.errors.append(str(error))
            logger.warning("%s", error)

    def _failed(self, export: Export, error: Exception) -> None:
        count("exports_failed")
        message = f"the export to {export.path} failed: {reason_of(error)}"
        self.errors.append(message)
        logger.warning(message)
        export.end(error)

    def _open(self, handle: SaveHandle) -> Source:
        """The version's tensors, at once held against the newer versions to come."""
        if not self._wait_for(handle, "complete"):
            raise handle.error or FlashpointError(
                f"step {handle.step} was not complete within {self.config.wait_s:g} s"
            )
        try:
            return self._source(handle.step)
        except CorruptObjectError as missing:
            if not self._fp.config.copies or not self._wait_for(handle, "replicated"):
                raise self._not_here(missing) from missing
        try:
            return self._source(handle.step)
        except CorruptObjectError as missing:
            raise self._not_here(missing) from missing

    def _wait_for(self, handle: SaveHandle, moment: str) -> bool:
        deadline = time.monotonic() + self.config.wait_s
        while not self._stop.is_set() and time.monotonic() < deadline:
            try:
                if handle.wait(moment, timeout_s=1.0):
                    return True
            except TimeoutError:  # of a strict session
                continue
            if handle.error is not None or handle.replication_error is not None:
                return False
        return False

    def _source(self, step: int) -> Source:
        def rename(name: str) -> str | None:
            return None if name in self._tied else self._rename(name)

        objects, view = self._fp.objects, None
        try:
            view = CheckpointView(objects, objects.container(step), verify=self._fp.config.verify)
            return Source(view, self._prefix, rename=rename, dtype=self.config.dtype)
        except BaseException as error:
            if view is not None:
                view.close()
            if isinstance(error, CheckpointNotFoundError):
                raise CheckpointNotFoundError(
                    f"step {step} was given up for a newer version before its export could hold it: raise keep or "
                    f"save less often ({error})"
                ) from error
            raise

    def _not_here(self, error: Exception) -> FlashpointError:
        return FlashpointError(
            f"{error}. An export is made of what lies on rank 0's node: with several nodes, set copies so that it "
            "holds every object, or export from long-term storage"
        )

    def _write(self, export: Export, source: Source) -> None:
        files = plan_files(source.items, max_shard_bytes=self.config.shard_bytes)
        dtypes = {item.dtype for item in source.items if getattr(torch, item.dtype).is_floating_point}
        extras = dict(self._extras)
        extras["config.json"] = _json(self._model_config, dtypes.pop() if len(dtypes) == 1 else None)
        write_folder(export.path, files, source.slabs, extras, stop=self._stop.is_set, replace=True)


def _json(model_config: Mapping[str, Any], dtype: str | None) -> bytes:
    """``config.json``; the dtype it tells is that of the exported tensors."""
    content = dict(model_config)
    if dtype is not None:
        content["torch_dtype" if "torch_dtype" in content else "dtype"] = dtype
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def _model_config(model: nn.Module | None, given: Any) -> dict[str, Any]:
    source = given if given is not None else getattr(_unwrapped(model), "config", None)
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        try:
            content = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"no configuration can be read from {str(path)!r}: {error}") from error
    else:
        to_json: Any = getattr(source, "to_json_string", None)
        content = json.loads(to_json()) if callable(to_json) else source
    if not isinstance(content, Mapping) or "model_type" not in content:
        raise ConfigError(
            "an export needs the model's configuration with its model_type: give model_config, or a model that has it"
        )
    content = dict(content)
    if model is not None and not content.get("architectures"):
        content["architectures"] = [type(_unwrapped(model)).__name__.removeprefix("FSDP")]
    return content


def _generation_config(model: nn.Module | None) -> dict[str, bytes]:
    config = getattr(_unwrapped(model), "generation_config", None)
    to_json: Any = getattr(config, "to_json_string", None)
    return {"generation_config.json": to_json().encode()} if callable(to_json) else {}


def _tokenizer_files(tokenizer: Any) -> dict[str, bytes]:
    """A tokenizer's files, read now: what is wrong with them is known before the first step."""
    if tokenizer is None:
        return {}
    if callable(getattr(tokenizer, "save_pretrained", None)):
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}
    try:
        folder = os.fspath(tokenizer)
    except TypeError:
        raise ConfigError(f"tokenizer must be a path or have save_pretrained, not {tokenizer!r}") from None
    if not os.path.isdir(folder):
        raise ConfigError(f"tokenizer: there is no folder {folder!r}")
    files = {name: Path(folder, name) for name in _TOKENIZER_FILES}
    found = {name: path.read_bytes() for name, path in files.items() if path.is_file()}
    if not found:
        raise ConfigError(f"tokenizer: {folder!r} holds none of a tokenizer's files, such as tokenizer.json")
    return found


def _tied_names(model: nn.Module) -> frozenset[str]:
    """Names that stand for a parameter which has another, earlier one; readers tie them again."""
    first: dict[int, str] = {}
    tied = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        bare = name.replace("_orig_mod.", "")
        if isinstance(model, nn.parallel.DistributedDataParallel):
            bare = bare.removeprefix("module.")
        if first.setdefault(id(parameter), bare) != bare:
            tied.add(bare)
    return frozenset(tied)


def _unwrapped(model: nn.Module | None) -> Any:
    """The model inside torch.compile's and DDP's wrappers."""
    while model is not None and not hasattr(model, "config"):
        inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            break
        model = inner
    return model
