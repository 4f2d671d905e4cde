"""A deterministic simulator: the real decisions of replication, retention and recovery, without any I/O.

One seed is one schedule: when which rank, agent or node dies, which messages are late, lost, doubled or cut off, which
bytes rot. `Replicator`, `Transfer`, placement, retrieval and retention are those of production; around them
memory, network, clock and the commit are models, a few lines each, of what `saver`, `loader`, `manager` and
`transport` do. After every event invariants I1 to I4 are asserted by `checker`, which sees everything.

    python -m flashpoint simulate --seeds 10000 --nodes 8
"""

from flashpoint.simulate.faults import Fault
from flashpoint.simulate.shrink import shrunk
from flashpoint.simulate.world import Outcome, Settings, Violation, simulate

__all__ = ["Fault", "Outcome", "Settings", "Violation", "shrunk", "simulate"]
