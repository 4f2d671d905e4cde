"""What somebody else does with a checkpoint: restore it with stock Orbax, where there is no Flashpoint.

    python examples/read_with_stock_orbax.py /dev/shm/my-job/last

It prints the step and the exam's loss as one line of JSON. It knows the model, and nothing of the job: not the
mesh, not how many processes wrote what it reads.
"""

import argparse
import importlib.util
import json
import sys

import jax
import orbax.checkpoint as ocp
from flax import nnx
from flax_gpt import abstract_state, exam


def main() -> int:
    parser = argparse.ArgumentParser(description="Restore the last checkpoint with stock Orbax.")
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    jax.config.update("jax_platforms", "cpu")
    with ocp.CheckpointManager(args.folder) as manager:
        step = manager.latest_step()
        wanted = abstract_state(args.seed, args.steps)
        state = manager.restore(step, args=ocp.args.StandardRestore(wanted))
    loss = exam(state["model"].filter(nnx.Param), args.seed)
    packages = ["flashpoint", "flashpoint_jax"]
    found = [name for name in packages if name in sys.modules or importlib.util.find_spec(name)]
    print(json.dumps({"step": step, "exam": loss.hex(), "flashpoint": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
