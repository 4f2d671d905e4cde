"""The demo around train_flax.py: kill the training, lose a node, and show that it does not matter.

1. Train on two nodes, undisturbed.
2. Train again from the same seed, in other folders. SIGKILL every process of the job at a random moment, start
   the same commands again, and SIGKILL it once more, this time in the middle of a save.
3. Kill it a third time; and with it one node dies for good: its agent is killed, its memory unmounted. With a new,
   empty node in its place the job goes on from the other's memory.
4. Compare every loss of the two runs, bit for bit.
5. Let stock Orbax, in an environment without Flashpoint, restore the last checkpoint: its loss must be the job's.

It exits with 1 if one bit differs, and leaves nothing behind.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import time
from contextlib import ExitStack
from pathlib import Path

from node_loss import NODE_TAG, Loopback, NodesRun, say
from watched_run import DemoFailed, console, equal_losses

READER_S = 120  # within which the stock reader must be done


class FlaxRun(NodesRun):
    """A run with one process of the job on each node."""

    nodes = 2

    def __init__(self, folder: Path, last: Path | None = None, **settings: int) -> None:
        super().__init__(folder, Loopback(), **settings)
        self.last = last  # where all nodes save the last step together, if they are to

    def command(self, node: int, port: int) -> tuple[list, dict]:
        arguments = f"""
            train --root {self.job_root(node)} --copies 1 --journal {self.folder}/attempt{self.attempt}
            --steps {self.steps} --save-every {self.save_every} --seed {self.seed}
            --nodes {self.nodes} --node {node} --job {self.net.address(0)}:{port}
        """.split()
        if self.last:
            arguments += ["--last", self.last]
        return [sys.executable, Path(__file__).with_name("train_flax.py"), *arguments], {
            "FLASHPOINT_AGENT_HOST": self.net.address(node),
            NODE_TAG: str(self.memories[node].path),
        }

    def versions(self, node: int) -> list[int]:
        """Steps in a node's memory, as Orbax names them."""
        return sorted(int(path.name) for path in self.job_root(node).glob("*") if path.name.isdigit())

    def exam(self) -> str:
        """The loss of the last state, of which all nodes are to say the same."""
        said = [
            e["exam"] for rank in range(self.nodes) for e in self.events(self.attempt, rank) if "exam" in e
        ]
        if len(said) != self.nodes or len(set(said)) != 1:
            raise DemoFailed(f"the nodes do not agree on the last state's loss: {said}")
        return said[0]


def demo(work: Path, steps: int, save_every: int, seed: int, kills: int) -> bool:
    settings = {"steps": steps, "save_every": save_every, "seed": seed}
    with ExitStack() as stack, console.status("starting") as status:
        begun = time.time()
        calm = FlaxRun(work / "undisturbed", **settings)
        stack.callback(calm.clean_up)
        where = "memories mounted" if calm.memories[0].is_mounted else "folders"
        say(f"{calm.nodes} nodes on this host ({where}), a process with 4 devices on each")
        calm.start()
        calm.until(steps + 1, status)
        calm.clean_up()  # its memory is wanted
        say(f"undisturbed: {steps} steps in {time.time() - begun:.0f} s")

        killed = FlaxRun(work / "killed", last=work / "last", **settings)
        stack.callback(killed.clean_up)
        for number in range(kills):
            killed.start()
            if killed.until(moment(number, of=kills + 1, steps=steps), status):
                if number % 2:
                    killed.until_inside_a_save(0.1, last_step=steps - 2)
                else:
                    time.sleep(random.uniform(0, 1) * calm.step_seconds())
                killed.kill()
            tell(killed, calm)

        killed.start()
        # A loss before the first save has its copies would be no accident to recover from.
        after = moment(kills, of=kills + 1, steps=steps)
        while killed.until(after, status) and not killed.replicated():
            after += 1
        killed.kill()
        tell(killed, calm)
        if len(killed.kills) <= kills:
            raise DemoFailed(f"the run was over before it could be killed {kills + 1} times")
        lost = random.randrange(killed.nodes)
        killed.lose(lost)
        killed.start()
        killed.until(steps + 1, status)
        tell(killed, calm)
        if killed.recovery(kills)["tiers"][lost] != "peer":
            raise DemoFailed(f"node {lost} does not say that its state came from a peer")
        held = [killed.versions(node) for node in range(killed.nodes)]
        if any(versions != [steps] for versions in held):
            raise DemoFailed(f"the nodes' managers should have kept step {steps} alone: {held}")

        equal, of = equal_losses(calm, killed)
        saves = [e["blocking"] for rank in range(calm.nodes) for e in calm.events(1, rank) if "blocking" in e]
        say(f"a save blocks for {1e3 * statistics.median(saves):.0f} ms, Orbax's own work included")
        say(f"losses: {equal} of {of} bit-identical with the undisturbed run")

        status.update("stock Orbax reads")
        read, own = read_without_flashpoint(killed, work / "stock"), killed.exam()
        same = read["exam"] == own and read["step"] == steps
        say(
            f"stock Orbax, without Flashpoint: step {read['step']}, loss {float.fromhex(read['exam']):.6f}; the job's "
            f"own: {float.fromhex(own):.6f}, {'bit-identical' if same else 'not the same'}"
        )
    return equal == of and same


def moment(number: int, *, of: int, steps: int) -> int:
    """A random step for a kill: each has its part of the run, and the latter half of that, after some saves."""
    return int(steps * (number + random.uniform(0.5, 0.9)) / (of + 0.5))


def tell(run: FlaxRun, calm: FlaxRun) -> None:
    """One line about the attempt that has just ended: where it came from, how far it came, whether it was right."""
    losses, expected = run.losses(run.attempt), calm.losses()
    steps = [step for _, step in losses]
    start = "from the beginning"
    if run.attempt > 1:
        again = run.recovery(run.attempt - 2)
        tier = "/".join(sorted(set(again["tiers"])))
        start = f"resumed from step {again['step']} ({tier} memory, {again['seconds']:.2f} s)"
    equal = sum(loss == expected.get(key) for key, loss in losses.items())
    verdict = (
        "bit-identical" if equal == len(losses) else f"{len(losses) - equal} of {len(losses)} LOSSES DIFFER"
    )
    say(f"{run.folder.name}, start {run.attempt}: {start}, steps {min(steps)} to {max(steps)}: {verdict}")


def read_without_flashpoint(run: FlaxRun, packages: Path) -> dict:
    """What stock Orbax finds in the last checkpoint, where Flashpoint cannot be imported.

    Python starts without its `site` module, and so without what is installed; for packages it has a folder with a
    link to each that is installed here, but for ours.
    """
    packages.mkdir()
    for folder in {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}:
        for package in folder.iterdir():
            if not package.name.startswith("flashpoint"):
                (packages / package.name).symlink_to(package)
    script = Path(__file__).with_name("read_with_stock_orbax.py")
    done = subprocess.run(
        [sys.executable, "-S", script, run.last, "--steps", str(run.steps), "--seed", str(run.seed)],
        env=os.environ | {"PYTHONPATH": str(packages), "TMPDIR": str(run.folder)},
        capture_output=True,
        text=True,
        timeout=READER_S,
        check=False,
    )
    if done.returncode:
        raise DemoFailed(f"stock Orbax cannot restore the last checkpoint:\n{done.stderr[-4000:]}")
    found = json.loads(done.stdout)
    if found["flashpoint"]:
        raise DemoFailed(f"the stock reader could import {', '.join(found['flashpoint'])}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--kills", type=int, default=2, help="without that of the lost node")
    parser.add_argument(
        "--seed", type=int, default=1, help="of the training; kills and lost node are random each time"
    )
    args = parser.parse_args()
    if args.steps < 4 * args.save_every * (args.kills + 1.5):
        parser.error(
            "the first kill could come before the first save is complete: more steps, or fewer kills"
        )

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # clean up on a polite kill, too
    work = Path(f"/dev/shm/flashpoint-demo-{os.getpid()}")
    work.mkdir(mode=0o700)
    begun = time.time()
    try:
        same = demo(work, args.steps, args.save_every, args.seed, args.kills)
    except KeyboardInterrupt:
        return 130
    except DemoFailed as error:
        say(str(error), style="red", markup=False)
        return 1
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if not same:
        say("the losses differ", style="bold red")
        return 1
    say(f"[bold green]every loss is bit-identical[/bold green] ({time.time() - begun:.0f} s in all)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
