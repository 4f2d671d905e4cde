"""Settings: typed, with units in their names, from arguments and ``FLASHPOINT_*`` environment variables.

An argument wins over the environment, the environment over the default. ``FLASHPOINT_MEMORY_LIMIT_BYTES``
sets ``memory_limit_bytes``, and so on for every field. Sizes may carry a binary unit: ``12GiB``, ``512MiB``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from flashpoint.errors import ConfigError
from flashpoint.replication import limits

ENV_PREFIX: Final = "FLASHPOINT_"
AGENTS: Final = ("process", "embedded")
STORAGES: Final = ("file", "s3", "gs")
COPIES_MAX: Final = 64
_UNITS: Final = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


@dataclass(frozen=True, kw_only=True)
class FlashpointConfig:
    """Every setting of a job's checkpoints on one node.

    Attributes:
        keep: complete versions to keep; older ones are given up once a newer one is complete. 0 keeps all.
        strict: raise when a save cannot be made, instead of warning and training on.
        verify: check every byte that is loaded against its digest.
        memory_limit_bytes: most that the job root may hold on this node; 0 takes it from the tmpfs and
            the cgroup.
        chunk_bytes: span of one checksum.
        seal_threads: threads of each rank that checksum a sealed buffer, in the background.
        load_threads: threads of each rank that verify, and copy JAX arrays, while training waits.
        commit_timeout_s: longest wait for the other ranks in one step of a commit.
        recovery_timeout_s: longest wait for the other ranks in one step of a recovery.
        overlap_wait_s: longest that a save waits for the one before it, before it is skipped.
        recycle_grace_s: how long a freed buffer rests before it is written again, unless space is
            short: raise it where stock readers, which take no locks, read live containers.
        prefault: touch the pages of new buffers in the background, ahead of the next save.
        allow_pickle: unpickle stored values that are not plain data, with everything that pickle can do.
        copies: copies of every object on other nodes, besides the one where it was written.
        agent: how the node's agent runs: ``process``, which outlives the trainer, or ``embedded``, a thread of it.
        failure_domain: what this node shares with others that fail together, such as a rack's name; copies
            go elsewhere where they can. Empty: it shares nothing.
        agent_host: address on which this node's agent listens; empty takes the one by which this host
            reaches the job's leader.
        agent_port: port on which it listens for messages; 0 takes any.
        agent_bulk_port: port on which it listens for bulk data; 0 takes any.
        agent_idle_s: how long it stays when no trainer lives and nobody asks it for anything.
        metrics_port: port on which it serves Prometheus metrics; 0 serves none.
        metrics_host: address on which it does.
        encrypt: seal bulk data between nodes. Messages always are.
        peer_timeout_s: longest that a transfer makes no progress, before it is given up.
        storage: URL of long-term storage, to which the agent drains versions: ``file:///folder``,
            ``s3://bucket/prefix`` or ``gs://bucket/prefix``. Empty: there is none.
        storage_every_n: drain every n-th version; 0 for no such rule.
        storage_every_s: drain one version in so many seconds; 0 for no such rule. Either rule may trigger; without
            any, the newest version is drained whenever the one before it is done.
        storage_keep_last: drained versions to keep; 0 keeps all.
        storage_keep_every: keep drained versions of steps that this divides for ever; 0 for no such rule.
        storage_bytes_per_s: most that a node writes to storage; 0 for no limit.
        storage_timeout_s: longest that storage may make no progress, before a drain is given up and tried again.
        scrub_bytes_per_s: how fast the agent verifies again what lies in memory, to find and repair what has rotted
            there; 0 for never.
    """

    keep: int = 1
    strict: bool = False
    verify: bool = True
    memory_limit_bytes: int = 0
    chunk_bytes: int = 4 << 20
    seal_threads: int = 2
    load_threads: int = 2
    commit_timeout_s: float = 60.0
    recovery_timeout_s: float = 300.0
    overlap_wait_s: float = 10.0
    recycle_grace_s: float = 0.0
    prefault: bool = True
    allow_pickle: bool = False
    copies: int = 0
    agent: str = "process"
    failure_domain: str = ""
    agent_host: str = ""
    agent_port: int = 0
    agent_bulk_port: int = 0
    agent_idle_s: float = 3600.0
    metrics_port: int = 0
    metrics_host: str = "127.0.0.1"
    encrypt: bool = True
    peer_timeout_s: float = 30.0
    storage: str = ""
    storage_every_n: int = 0
    storage_every_s: float = 0.0
    storage_keep_last: int = 3
    storage_keep_every: int = 0
    storage_bytes_per_s: int = 256 << 20
    storage_timeout_s: float = 60.0
    scrub_bytes_per_s: int = 64 << 20

    def __post_init__(self) -> None:
        _at_least("keep", self.keep, 0)
        _at_least("memory_limit_bytes", self.memory_limit_bytes, 0)
        if self.chunk_bytes < 4096 or self.chunk_bytes & (self.chunk_bytes - 1):
            raise ConfigError(f"chunk_bytes must be a power of two of at least 4096, not {self.chunk_bytes}")
        for name in ("seal_threads", "load_threads"):
            _at_least(name, getattr(self, name), 1)
        for name in ("commit_timeout_s", "recovery_timeout_s", "peer_timeout_s", "storage_timeout_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(
                    f"{name} must be a positive, finite number of seconds: every wait has a deadline"
                )
        for name in ("overlap_wait_s", "recycle_grace_s", "agent_idle_s", "storage_every_s"):
            _at_least(name, getattr(self, name), 0)
        _at_least("copies", self.copies, 0)
        _at_most("copies", self.copies, COPIES_MAX)
        if self.agent not in AGENTS:
            raise ConfigError(f"agent must be one of {', '.join(AGENTS)}, not {self.agent!r}")
        _plain("failure_domain", self.failure_domain, limits.DOMAIN_CHARS_MAX)
        for name in ("agent_host", "metrics_host"):
            host = getattr(self, name)
            _plain(name, host, limits.HOST_CHARS_MAX)
            if " " in host:
                raise ConfigError(f"{name} must be an address or a host's name, not {host!r}")
        for name in ("agent_port", "agent_bulk_port", "metrics_port"):
            _at_least(name, getattr(self, name), 0)
            _at_most(name, getattr(self, name), 65_535)
        _storage_url(self.storage)
        for name in ("storage_every_n", "storage_keep_last", "storage_keep_every", "storage_bytes_per_s"):
            _at_least(name, getattr(self, name), 0)
        _at_least("scrub_bytes_per_s", self.scrub_bytes_per_s, 0)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> FlashpointConfig:
        """Settings from the environment, under those given here (None means: not given).

        Raises:
            ConfigError: a value of a wrong type or range, or an argument that is no setting.
        """
        environ = os.environ if environ is None else environ
        known = {field.name: type(field.default) for field in fields(cls)}
        for name in overrides:
            if name not in known:
                raise ConfigError(f"{name!r} is not a setting; settings are: {', '.join(known)}")
        settings: dict[str, Any] = {}
        for name, kind in known.items():
            variable = ENV_PREFIX + name.upper()
            if overrides.get(name) is not None:
                source, value = name, overrides[name]
            elif variable in environ:
                source, value = variable, environ[variable]
            else:
                continue
            settings[name] = _convert(source, value, kind)
            try:
                cls(**{name: settings[name]})  # settings do not depend on each other
            except ConfigError as error:
                raise ConfigError(f"{source}={value!r}: {error}") from None
        return cls(**settings)

    @property
    def has_agent(self) -> bool:
        """Whether each node has an agent: to copy, to drain, to show metrics."""
        return bool(self.copies or self.storage or self.metrics_port)

    def to_env(self) -> dict[str, str]:
        """These settings as environment variables, for a process to be started: `from_env` gives them back."""
        return {ENV_PREFIX + field.name.upper(): str(getattr(self, field.name)) for field in fields(self)}


def parse_bytes(text: str) -> int:
    """``"12GiB"`` -> 12884901888. Units are B, KiB, MiB, GiB, TiB; a bare number counts bytes."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?I?B?)", text.strip().upper(), re.ASCII)
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{text!r} is not a size: write it like 512MiB or 12GiB")
    return int(float(match[1]) * _UNITS[match[2]]) if "." in match[1] else int(match[1]) * _UNITS[match[2]]


def _convert(source: str, value: Any, kind: type) -> Any:
    try:
        if kind is bool:
            return _bool(value)
        if kind is str:
            if not isinstance(value, str):
                raise ValueError("text is wanted")
            return value.strip()
        if kind is float:
            if isinstance(value, bool):
                raise ValueError("a number of seconds is wanted")
            return float(value)
        if isinstance(value, str):
            return parse_bytes(value) if source.lower().endswith(("_bytes", "_bytes_per_s")) else int(value)
        if isinstance(value, bool) or int(value) != value:
            raise ValueError("a whole number is wanted")
        return int(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise ConfigError(f"{source}={value!r}: {error}") from None


def _bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    known = {
        "1": True,
        "true": True,
        "yes": True,
        "on": True,
        "0": False,
        "false": False,
        "no": False,
        "off": False,
    }
    try:
        return known[str(value).strip().lower()]
    except KeyError:
        raise ValueError("yes or no is wanted") from None


def _at_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise ConfigError(f"{name} must be at least {least}, not {value}")


def _at_most(name: str, value: float, most: float) -> None:
    if not value <= most:
        raise ConfigError(f"{name} must be at most {most}, not {value}")


def _plain(name: str, text: str, chars_max: int) -> None:
    if len(text) > chars_max or not text.isprintable():
        raise ConfigError(f"{name} must be printable text of at most {chars_max} characters")


def _storage_url(url: str) -> None:
    if not url:
        return
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in STORAGES or not url.isprintable() or len(url) > 4096:
        known = ", ".join(f"{name}://" for name in STORAGES)
        raise ConfigError(f"storage must be a URL that begins with one of {known}, not {url!r}")
    if scheme == "file" and (not rest.startswith("/") or ".." in rest.split("/") or not rest.strip("/")):
        raise ConfigError(f"storage must name an absolute folder, as in file:///mnt/checkpoints, not {url!r}")
    if scheme != "file" and not rest.split("/")[0]:
        raise ConfigError(f"storage must name a bucket, as in {scheme}://bucket/prefix, not {url!r}")
