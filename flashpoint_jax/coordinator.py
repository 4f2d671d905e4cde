"""The coordinator over JAX's coordination service: the key-value store that `jax.distributed.initialize` starts.

Its client may be used by any number of threads at once, and takes and gives bytes (64 MiB were tried, so values
are not cut up). Nothing here touches a device, so it runs beside the training job's collectives.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import jax
from jax._src import distributed  # the client has no public name; Orbax takes it from here too

from flashpoint.coordinator import Coordinator, SingleProcessCoordinator
from flashpoint.errors import DeadlineError, FlashpointError

_PREFIX: Final = "flashpoint"
# Deleting a key deletes all keys below it. With this at its end, no key lies below another.
_END: Final = "/="


class JaxCoordinator(Coordinator):
    """Processes that share a coordination service.

    Args:
        client: of the service (``jax._src.distributed.global_state.client``).
        prefix: under which all keys lie, so that nobody else's are touched.
    """

    def __init__(
        self, client: Any, *, rank: int, world_size: int, local_rank: int, prefix: str = _PREFIX
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.local_rank = local_rank
        self._client = client
        self._prefix = prefix

    def publish(self, key: str, value: bytes) -> None:
        with _told(f"{key!r} was published"):
            self._client.key_value_set_bytes(self._name(key), value, allow_overwrite=True)

    def fetch(self, key: str, timeout_s: float) -> bytes:
        with _told(f"{key!r} was awaited", f"nothing was published under {key!r} within {timeout_s:g} s"):
            # A value that is there comes with any deadline but none: 1 ms is the least that has an effect.
            timeout_ms = max(math.ceil(timeout_s * 1000), 1)
            return bytes(self._client.blocking_key_value_get_bytes(self._name(key), timeout_ms))

    def remove(self, key: str) -> None:
        with _told(f"{key!r} was removed"):
            self._client.key_value_delete(self._name(key))

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}{_END}"


@contextmanager
def _told(what: str, deadline: str = "") -> Iterator[None]:
    """Tell a deadline from a service that is gone."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if deadline and str(error).startswith("DEADLINE_EXCEEDED"):
            raise DeadlineError(deadline) from error
        raise FlashpointError(f"JAX's coordination service is gone while {what}: {error}") from error


def default_coordinator(name: str = "") -> Coordinator:
    """A new coordinator of all processes of this JAX program, or of this process alone where there is one.

    The processes make the same calls in the same order: the n-th of this ``name`` on one has the keys of the
    n-th on every other.

    Args:
        name: what the coordinator is for, such as a checkpoint's item.
    """
    state = distributed.global_state
    if state.client is None or (state.num_processes or 1) == 1:
        return SingleProcessCoordinator()
    rank = int(state.process_id)
    # Counted in the service, not in the process: it lives as long as the keys do.
    number = state.client.key_value_increment(f"{_PREFIX}/sessions/{name}/{rank}", 1)
    return JaxCoordinator(
        state.client,
        rank=rank,
        world_size=int(state.num_processes),
        local_rank=rank,  # as unique as a number among those of the node, which JAX does not give
        prefix=f"{_PREFIX}/{name}.{number}",
    )
