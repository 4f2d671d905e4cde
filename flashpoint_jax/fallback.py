"""What `recover` falls back to: checkpoints that stock Orbax reads from long-term storage."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import orbax.checkpoint as ocp

from flashpoint.errors import FlashpointError
from flashpoint_jax.folder import step_of
from flashpoint_jax.orbax_root import STEP_FILE
from flashpoint_jax.sidecars import TREE_FILE


def load_manager(manager: Any, abstract_state: Any, item: str | Sequence[str]) -> tuple[int, Any] | None:
    """A manager's latest step and its state; None where it has no step."""
    step = manager.latest_step()
    if step is None:
        return None
    if item == "default":
        return step, manager.restore(step, args=ocp.args.StandardRestore(abstract_state))
    states = {item: abstract_state} if isinstance(item, str) else {one: abstract_state[one] for one in item}
    args = {name: ocp.args.StandardRestore(state) for name, state in states.items()}
    found = manager.restore(step, args=ocp.args.Composite(**args))
    return step, found[item] if isinstance(item, str) else {name: found[name] for name in states}


def load_path(path: str, abstract_state: Any, item: str | Sequence[str]) -> tuple[int | None, Any] | None:
    """What lies at a path: an item's folder, a step's, or a manager's root, whose latest step it is then."""
    if not os.path.exists(f"{path}/{TREE_FILE}") and not os.path.exists(f"{path}/{STEP_FILE}"):
        options = ocp.CheckpointManagerOptions(read_only=True)
        with ocp.CheckpointManager(path, options=options) as manager:
            return load_manager(manager, abstract_state, item)
    is_item = os.path.exists(f"{path}/{TREE_FILE}")
    if is_item and not isinstance(item, str):
        raise FlashpointError(
            f"{path} holds one item, and {len(item)} are wanted: give the path of their step"
        )
    names = [item] if isinstance(item, str) else list(item)
    loaded = {}
    with ocp.StandardCheckpointer() as checkpointer:
        for name in names:
            wanted = abstract_state if isinstance(item, str) else abstract_state[name]
            loaded[name] = checkpointer.restore(path if is_item else f"{path}/{name}", wanted)
    named = step_of(os.path.basename(os.path.normpath(path)))
    if named is None and is_item:
        named = step_of(os.path.basename(os.path.dirname(os.path.normpath(path))))
    return named, loaded[item] if isinstance(item, str) else loaded
