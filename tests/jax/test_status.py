"""`flashpoint_jax.status`: what a node's memory holds of an item, and what of a step was lost after it was finished."""

from __future__ import annotations

import os
from pathlib import Path

import orbax.checkpoint as ocp
import pytest

import flashpoint_jax
from flashpoint.errors import FlashpointError
from tests.jax import trees
from tests.jax.test_manager import manager, small

BLOB = "rank00000-0.safetensors"


def test_finished_steps_are_told_newest_first_with_who_holds_them(job_root: str) -> None:
    assert flashpoint_jax.status(job_root) == []
    with manager(job_root) as m:
        for step in (1, 2):
            m.save(step, args=ocp.args.StandardSave(small(step)))
        m.wait_until_finished()
        found = flashpoint_jax.status(m)
    assert [(one.step, one.state, dict(one.holders)) for one in found] == [
        (2, "complete", {BLOB: (0,)}),
        (1, "complete", {BLOB: (0,)}),
    ]
    assert flashpoint_jax.status(job_root, item="other") == []


def test_a_blob_that_was_deleted_later_has_no_holder_and_its_step_is_passed_over(job_root: str) -> None:
    """Orbax's own list still has the step: nothing tells of a deletion."""
    with manager(job_root) as m:
        for step in (1, 2):
            m.save(step, args=ocp.args.StandardSave(small(step)))
        m.wait_until_finished()
        os.unlink(f"{job_root}/2/default/{BLOB}")
        assert m.latest_step() == 2
        newest, older = flashpoint_jax.status(m)
        assert (newest.holders[BLOB], older.holders[BLOB]) == ((), (0,))
        for look in (m.item_metadata, m.restore):
            with pytest.raises(FlashpointError, match=f"lacks {BLOB}.*restore another step"):
                look(2)
        found = flashpoint_jax.recover(m, trees.abstract(small()))
        assert found is not None
        assert found.step == m.latest_step() == 1
        trees.assert_equal(found.state, small(1))


def test_a_step_whose_manifest_was_lost_is_none_of_the_versions(
    job_root: str, caplog: pytest.LogCaptureFixture
) -> None:
    with manager(job_root) as m:
        for step in (1, 2):
            m.save(step, args=ocp.args.StandardSave(small(step)))
    Path(job_root, "2", "default", ".metadata").unlink()
    assert [one.step for one in flashpoint_jax.status(job_root)] == [1]
    assert "2/default is none of the versions" in caplog.text
