"""Flashpoint for JAX: memory-first checkpoints through Orbax.

```python
import flashpoint_jax
manager = ocp.CheckpointManager("/dev/shm/job-1", options=options, handler_registry=flashpoint_jax.registry())
manager.save(step, args=ocp.args.StandardSave(state))       # as before
state = manager.restore(step, args=ocp.args.StandardRestore(abstract_state))

params = flashpoint_jax.load("/dev/shm/job-2/step-100_ckpt", abstract_params)       # of a PyTorch job
```
"""

try:
    import jax as _jax  # noqa: F401
    import orbax.checkpoint as _orbax  # noqa: F401
    import tensorstore as _tensorstore  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        f"flashpoint_jax needs JAX, Orbax and TensorStore: pip install 'flashpoint[jax]' ({error})"
    ) from error

from flashpoint_jax.exchange import load
from flashpoint_jax.handlers import (
    FlashpointCheckpointHandler,
    FlashpointPyTreeHandler,
    FlashpointRestore,
    FlashpointSave,
    FlashpointStandardHandler,
    registry,
)
from flashpoint_jax.recovery import RecoverResult, recover, wait_until_replicated
from flashpoint_jax.status import status
from flashpoint_jax.step_names import StepNameFormat

__all__ = [
    "FlashpointCheckpointHandler",
    "FlashpointPyTreeHandler",
    "FlashpointRestore",
    "FlashpointSave",
    "FlashpointStandardHandler",
    "RecoverResult",
    "StepNameFormat",
    "load",
    "recover",
    "registry",
    "status",
    "wait_until_replicated",
]
