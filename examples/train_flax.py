"""Train a small Flax GPT on two nodes through a stock Orbax manager, with Flashpoint behind it. (make demo-jax)

    python examples/train_flax.py           the whole demo (see run_flax_demo.py): train once in peace and once
                                            with kills, then compare every loss of the two, bit for bit
    python examples/train_flax.py train --root /dev/shm/my-job
                                            only the training, alone on this host; kill it, start it again:
                                            it resumes

What is trained and what is saved is in flax_gpt.py. The manager is Orbax's own, and Flashpoint is two lines of
`train`: [1] and [2]. Each process is a node: its checkpoints lie in a folder of its own, in memory.
"""

import argparse
import sys
import time

import jax
import orbax.checkpoint as ocp
from flax import nnx
from flax_gpt import abstract_state, exam, loss_of, new, state_of, text_to_read, windows
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from journal import Journal

import flashpoint_jax

DEVICES = 4  # of each process: two along the axis "model"; the axis "data" runs on through all processes


def train(
    root: str, copies: int, steps: int, save_every: int, seed: int, last: str | None, journal: Journal
) -> None:
    mesh = jax.make_mesh(
        (jax.device_count() // 2, 2), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto)
    )
    abstract = abstract_state(seed, steps, mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    rows = NamedSharding(mesh, PartitionSpec("data"))

    @jax.jit(donate_argnums=0, out_shardings=(shardings, None))
    def train_step(state, tokens, targets):
        model, optimizer = new(seed, steps)
        nnx.update(model, state["model"])
        nnx.update(optimizer, state["optimizer"])
        loss, gradient = nnx.value_and_grad(loss_of)(model, tokens, targets)
        optimizer.update(model, gradient)
        return state_of(model, optimizer), loss

    # Each process has a folder of its own. Orbax wants to be told twice, and Flashpoint once.
    own_folder = ocp.options.MultiprocessingOptions(primary_host=None)
    options = ocp.CheckpointManagerOptions(
        max_to_keep=1, multiprocessing_options=own_folder, enable_per_process_directory_creation=True
    )
    with ocp.CheckpointManager(
        root,
        options=options,
        handler_registry=flashpoint_jax.registry(multiprocessing_options=own_folder, copies=copies),  # [1]
    ) as manager:
        # The newest step that all nodes have, or can get from their peers. Asking each node's manager would not do:
        # one may have committed a step that the kill kept from the other, and that of a new node knows nothing.
        found = flashpoint_jax.recover(manager, abstract)  # [2]
        if found:
            done, state = found.step, found.state
            journal.write(resumed=found.step, tier=found.tier, seconds=found.seconds)
        else:
            done, state = 0, jax.jit(lambda: state_of(*new(seed, steps)), out_shardings=shardings)()

        saved = None
        text = text_to_read()
        for step in range(done + 1, steps + 1):
            batch = [
                jax.make_array_from_callback(part.shape, rows, part.__getitem__)
                for part in windows(text, seed, step)
            ]
            state, loss = train_step(state, *batch)
            journal.write(step=step, loss=float(loss).hex())
            if step % save_every == 0 or step == steps:
                # The copies of the save before this one were made long ago as a rule. Training need not ask.
                if saved and copies and flashpoint_jax.wait_until_replicated(manager, saved, timeout_s=10):
                    journal.write(version=saved, replicated=True)
                begun = time.time()
                manager.save(step, args=ocp.args.StandardSave(state))  # back as soon as the state is copied
                journal.write(version=step, blocking=time.time() - begun)
                saved = step
        manager.wait_until_finished()

    if last:
        keep_for_good(last, steps, state)
        everywhere = NamedSharding(mesh, PartitionSpec())
        whole = jax.jit(lambda state: state, out_shardings=everywhere)(state["model"].filter(nnx.Param))
        journal.write(exam=exam(jax.tree.map(lambda leaf: leaf.addressable_data(0), whole), seed).hex())


def keep_for_good(folder: str, step: int, state) -> None:
    """Save a state in one folder of all processes.

    The folders of single nodes hold what those nodes have, and stock Orbax finds the whole of a cut array in none
    of them. In this one it does: that is the form for whoever is to read it elsewhere, without Flashpoint.
    """
    with ocp.CheckpointManager(folder, handler_registry=flashpoint_jax.registry(copies=0)) as manager:
        manager.save(step, args=ocp.args.StandardSave(state))


def main() -> int:
    if sys.argv[1:2] != ["train"]:
        import run_flax_demo

        return run_flax_demo.main()
    parser = argparse.ArgumentParser(prog="train_flax.py train", description="What runs on each node.")
    parser.add_argument("--root", required=True, help="this node's folder, best in memory (/dev/shm/...)")
    parser.add_argument("--copies", type=int, default=0, help="of every object, on other nodes")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--last", help="save the last step once more, in this folder of all nodes, and take an exam"
    )
    parser.add_argument("--journal", help="write <this>-rank<n>.jsonl instead of printing rank 0's events")
    parser.add_argument("--job", default=None, help="address:port of the first process, if there are several")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--node", type=int, default=0)
    args = parser.parse_args(sys.argv[2:])

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    if args.nodes > 1:
        jax.distributed.initialize(args.job, num_processes=args.nodes, process_id=args.node)
    journal = Journal(args.journal, args.node)
    train(args.root, args.copies, args.steps, args.save_every, args.seed, args.last, journal)
    if args.nodes > 1:
        jax.distributed.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
