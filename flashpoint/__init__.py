"""Flashpoint: memory-first checkpoints. This package is the framework-neutral core.

```python
import flashpoint
with flashpoint.open("/dev/shm/job-1/step-100_ckpt") as checkpoint:
    checkpoint["model.weight"]          # a read-only numpy view, no copy, verified on first use
```
"""

from flashpoint.buffers import BufferObject
from flashpoint.config import FlashpointConfig
from flashpoint.coordinator import Coordinator, SingleProcessCoordinator
from flashpoint.errors import FlashpointError
from flashpoint.handle import SaveHandle
from flashpoint.ids import CheckpointContainerId, CheckpointObjectId
from flashpoint.loader import MLFlashpointCheckpointLoader
from flashpoint.objects import CheckpointObjectManager
from flashpoint.saver import MLFlashpointCheckpointSaver
from flashpoint.view import CheckpointView
from flashpoint.view import open_container as open

__version__ = "0.1.0"

__all__ = [
    "BufferObject",
    "CheckpointContainerId",
    "CheckpointObjectId",
    "CheckpointObjectManager",
    "CheckpointView",
    "Coordinator",
    "FlashpointConfig",
    "FlashpointError",
    "MLFlashpointCheckpointLoader",
    "MLFlashpointCheckpointSaver",
    "SaveHandle",
    "SingleProcessCoordinator",
    "open",
]
