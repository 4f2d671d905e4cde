"""Flashpoint for PyTorch: memory-first checkpoints for training loops and ``torch.distributed.checkpoint``.

import flashpoint_torch as fpt
with fpt.init("/dev/shm/job-1", keep=1) as fp:      # on every rank
    fp.recover(state)                               # None, or what was loaded into `state`
    fp.async_save(state, step=20)                   # returns when staged

fpt.load("/dev/shm/job-2/100/default", state)       # of a JAX job
"""

from flashpoint.handle import SaveHandle
from flashpoint_torch.exchange import load
from flashpoint_torch.reader import FlashpointReader
from flashpoint_torch.session import Flashpoint, RecoverResult, init
from flashpoint_torch.writer import FlashpointWriter

__all__ = [
    "Flashpoint",
    "FlashpointReader",
    "FlashpointWriter",
    "RecoverResult",
    "SaveHandle",
    "init",
    "load",
]
