"""A drain to a local folder: killed and failed at every call on the memory that it reads and the storage it writes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from flashpoint.config import FlashpointConfig
from flashpoint.errors import FlashpointError
from flashpoint.objects import CheckpointObjectManager
from flashpoint.replication.inventory import Inventory
from flashpoint.retention import Version
from flashpoint.storage import claim, drainer, local
from tests import checker
from tests.checker import Expected
from tests.crash.scenes import WAIT_S, Result, Scene, Span, open_below, save
from tests.crash.tracer import Fault

_ = local  # imported here, once, and not by every forked process
JOB: Final = "ab" * 16
OFFER_S: Final = 0.2


class Draining(Scene):
    """Step 2 is drained, and step 1, which was, is deleted in storage; by a drainer as an agent has it."""

    name = "drain"

    @property
    def storage(self) -> str:
        return f"{self.folder}/storage"

    def roles(self) -> dict[str, str]:
        return {**super().roles(), self.storage: "storage"}

    def _storage_config(self) -> FlashpointConfig:
        return self.config(storage=f"file://{self.storage}", storage_keep_last=1, storage_timeout_s=WAIT_S)

    def prepare(self, rank: int, meeting: str, say: Callable[[Any], None]) -> None:
        os.makedirs(self.storage)
        claim.claim(self._storage_config(), self.roots[0], JOB, 1, None)
        job, saver = self.open(rank, meeting, self.config(keep=0))
        save(saver, 1)
        self._drain(Version(1, 1), say, Span(None))
        save(saver, 2)
        job.objects.close()

    def act(self, rank: int, say: Callable[[Any], None], span: Span, goes_on: bool) -> None:
        self._drain(Version(1, 2), say, span)
        say(("open", open_below([*self.roots, self.storage])))

    def recover(self, rank: int, meeting: str, say: Callable[[Any], None]) -> None:
        self._drain(Version(1, 2), say, Span(None))

    def go_on(self, rank: int, meeting: str, say: Callable[[Any], None]) -> None:
        job, saver = self.open(rank, meeting, self.config(keep=0))
        save(saver, 3)
        self._drain(Version(job.epoch, 3), say, Span(None))
        job.objects.close()

    def _drain(self, version: Version, say: Callable[[Any], None], span: Span) -> None:
        drainer.AGAIN_S = 0.02  # type: ignore[misc]
        config = self._storage_config()
        span.begin()
        try:
            objects = CheckpointObjectManager(self.roots[0], rank=None, config=config)
        except (FlashpointError, OSError) as error:
            say(("failed", str(error)))
            return
        inventory = Inventory(objects)
        drains = drainer.Drainer(objects, config, job=JOB, epoch=1, index=0, leader=0, ranks=(0,))
        deadline, offer_s = time.monotonic() + WAIT_S, 0.0
        while drains.last != version or drains.is_busy:
            now_s = time.monotonic()
            if now_s > deadline:
                say(("error", f"step {version.step} is not drained: {drains.error or 'nothing is said'}"))
                break
            if now_s > offer_s:
                offer_s = now_s + OFFER_S
                try:
                    drains.offer(list(inventory.look().values()))
                except (FlashpointError, OSError):  # the agent's loop looks again
                    continue
            time.sleep(0.005)
        else:
            say(("drained", version.step))
        span.end()
        drains.close()
        objects.close()
        del drains, inventory, objects

    def expected(self, said: Sequence[tuple[str, Any]]) -> Expected:
        step = max([1, *(value for what, value in said if what == "drained")])
        return Expected({step: [0] for step in (1, 2, 3)}, floor=(1, step), ranks=self._ranks())

    def _run(self, fault: Fault | None) -> Result:
        result = super()._run(fault)
        if fault is None:
            events = [(event.call.name, event.paths) for event in result.events]
            result.wrong += checker.lost_by_power(events, self.storage)
        return result

    def _look(self, result: Result, when: str, expected: Expected) -> None:
        memory = expected._replace(floor=(1, 2))
        super()._look(result, when, memory)
        wrong = checker.storage_violations(self.storage, expected)
        result.wrong += [f"{text} ({when})" for text in wrong]

    def _afterwards(self, result: Result, expected: Expected) -> None:
        for meeting, work, step in (("recover", self.recover, 2), ("go on", self.go_on, 3)):
            said = self._together(meeting, work)
            result.wrong += [f"I4: the restarted agent: {value}" for what, value in said if what == "error"]
            epoch = max(
                version[0] for node in self._read() for version in node.complete if version[1] == step
            )
            self._look(result, meeting, expected._replace(floor=(epoch, step)))
        wrong = checker.storage_violations(self.storage, expected, at_rest=[3])
        result.wrong += [f"{text} (at last)" for text in wrong]
