"""What a training process of a demo tells the one that watches it."""

import json
import sys
import time


class Journal:
    """One line of JSON for each event of this rank: what the demo watches, and compares in the end.

    Losses are written as `float.hex()`, so that no bit of them is rounded away.

    Args:
        prefix: of the file's name; without one, rank 0 prints its events.
    """

    def __init__(self, prefix: str | None, rank: int) -> None:
        self.file = None
        if prefix:
            self.file = open(f"{prefix}-rank{rank}.jsonl", "w", buffering=1)  # noqa: SIM115
        elif rank == 0:
            self.file = sys.stdout

    def write(self, **event) -> None:
        if self.file:
            print(json.dumps(event | {"at": time.time()}), file=self.file)
