"""Flashpoint for PyTorch: memory-first checkpoints for training loops and ``torch.distributed.checkpoint``.

```python
import flashpoint_torch as fpt
with fpt.init("/dev/shm/job-1", keep=1) as fp:      # on every rank
    fp.recover(state)                               # None, or what was loaded into `state`
    fp.async_save(state, step=20)                   # returns when staged

fpt.load("/dev/shm/job-2/100/default", state)       # of a JAX job
```
"""

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError("flashpoint_torch needs PyTorch: pip install 'flashpoint[torch]'") from error

from flashpoint.handle import SaveHandle
from flashpoint_torch.exchange import load
from flashpoint_torch.hf_export import Export, Saver, SaverConfig
from flashpoint_torch.progress import StepInfo
from flashpoint_torch.reader import FlashpointReader
from flashpoint_torch.recover_handler import RecoverConfig, RecoverHandler, Resumed
from flashpoint_torch.session import Flashpoint, RecoverResult, init
from flashpoint_torch.supervise import supervise
from flashpoint_torch.training_state import Engine
from flashpoint_torch.writer import FlashpointWriter

__all__ = [
    "Engine",
    "Export",
    "Flashpoint",
    "FlashpointReader",
    "FlashpointWriter",
    "RecoverConfig",
    "RecoverHandler",
    "RecoverResult",
    "Resumed",
    "SaveHandle",
    "Saver",
    "SaverConfig",
    "StepInfo",
    "init",
    "load",
    "supervise",
]
