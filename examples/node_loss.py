"""Lose one node of three with all its memory, and show that it does not matter. (make demo-node-loss)

1. Train on three nodes, undisturbed.
2. Train again from the same seed, with a copy of every object on another node. SIGKILL the job at a random
   moment; then one node dies for good: its agent is killed, its memory unmounted. Start the same command
   with a new, empty node in its place: it gets its state from the others' memory.
3. Compare every loss of the two runs, bit for bit, and exit with 1 if one differs.

All nodes are on this host. For root, each has a tmpfs and a network namespace of its own, with a cable to a
common switch; else a folder in /dev/shm and a loopback address. What each rank runs is train_gpt.py: that
there are copies, it is told by FLASHPOINT_COPIES=1 in its environment.
"""

import argparse
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from watched_run import DemoFailed, Run, console, equal_losses

NODES = 3
say = partial(console.print, soft_wrap=True)
NODE_TAG = "FLASHPOINT_DEMO_NODE"  # an environment variable that marks all processes of one node
MEMORY = "4G"  # most that one node's tmpfs may take


# --- hosts, as far as one host can play them ---


def ok(*command: object) -> bool:
    """Whether a command could be run, and did what it was to do."""
    try:
        return not subprocess.run([str(word) for word in command], capture_output=True, timeout=30).returncode
    except (OSError, subprocess.TimeoutExpired):
        return False


class Loopback:
    """Nodes that differ by their loopback addresses."""

    name = "loopback addresses"
    interface = "lo"

    def address(self, node: int) -> str:
        return f"127.0.0.{node + 1}"

    def inside(self, node: int) -> list[str]:
        """What to put before a command, to run it on this node."""
        return []

    def free_port(self) -> int:
        with socket.create_server((self.address(0), 0)) as server:
            return server.getsockname()[1]


class Namespaces:
    """Nodes with network namespaces of their own, cabled to a switch in one more: this host's own network
    has no part in it, and nothing of it leaves this host."""

    name = "network namespaces"
    interface = "cable"

    def __init__(self, prefix: str, stack: ExitStack) -> None:
        self.prefix, self.port = prefix, 29400
        switch = f"{prefix}-switch"
        self.make(stack, switch)
        self.must("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
        self.must("ip", "-n", switch, "link", "set", "switch", "up")
        for node in range(NODES):
            name = f"{prefix}-{node}"
            self.make(stack, name)
            ends = ("type", "veth", "peer", f"node{node}", "netns", switch)
            self.must("ip", "-n", name, "link", "add", self.interface, *ends)
            self.must("ip", "-n", switch, "link", "set", f"node{node}", "master", "switch", "up")
            self.must("ip", "-n", name, "address", "add", f"{self.address(node)}/24", "dev", self.interface)
            for interface in ("lo", self.interface):
                self.must("ip", "-n", name, "link", "set", interface, "up")

    def make(self, stack: ExitStack, name: str) -> None:
        self.must("ip", "netns", "add", name)
        stack.callback(ok, "ip", "netns", "delete", name)  # and with it its ends of cables

    @staticmethod
    def must(*command: str) -> None:
        if not ok(*command):
            raise OSError(f"{' '.join(command)} failed")

    def address(self, node: int) -> str:
        return f"10.77.0.{node + 1}"

    def inside(self, node: int) -> list[str]:
        return ["ip", "netns", "exec", f"{self.prefix}-{node}"]

    def free_port(self) -> int:
        self.port += 1  # nobody else is there to take it
        return self.port


@contextmanager
def network(plain: bool) -> Iterator[Loopback | Namespaces]:
    """Network namespaces if this host allows them, else loopback addresses."""
    with ExitStack() as stack:
        try:
            if plain:
                raise OSError("not wanted")
            with ExitStack() as attempt:
                found: Loopback | Namespaces = Namespaces(f"flashpoint-{os.getpid()}", attempt)
                stack.push(attempt.pop_all())
        except OSError:
            found = Loopback()
        yield found


class Memory:
    """One node's memory: a tmpfs of its own if this host allows it, else a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_mounted = False
        self.plug_in()

    def plug_in(self) -> None:
        self.path.mkdir(parents=True)
        options = f"size={MEMORY},mode=700"
        self.is_mounted = os.geteuid() == 0 and ok(
            "mount", "-t", "tmpfs", "-o", options, "flashpoint", self.path
        )

    def pull_out(self) -> None:
        shutil.rmtree(
            self.path, ignore_errors=True
        )  # a mount that other namespaces know goes with the last of them
        if self.is_mounted:
            ok("umount", "--lazy", self.path)
            shutil.rmtree(self.path, ignore_errors=True)

    def used(self) -> int:
        """Bytes in it."""
        files = (path.lstat() for path in self.path.rglob("*") if path.is_file())
        return sum({status.st_ino: status.st_blocks * 512 for status in files}.values())


# --- a run on several nodes ---


class NodesRun(Run):
    """A run with one torchrun for each node, as on hosts of their own."""

    survives = "agent"  # a crash of the training is none of the nodes' agents
    nodes = NODES

    def __init__(self, folder: Path, net: Loopback | Namespaces, **settings: int) -> None:
        super().__init__(folder, ranks=self.nodes, **settings)
        self.net = net
        self.memories = [Memory(folder / f"node-{node}") for node in range(self.nodes)]

    def commands(self) -> list[tuple[list, dict]]:
        port = self.net.free_port()
        return [self.command(node, port) for node in range(self.nodes)]

    def command(self, node: int, port: int) -> tuple[list, dict]:
        launcher = f"""
            -m torch.distributed.run --nnodes {NODES} --node-rank {node} --nproc-per-node 1
            --master-addr {self.net.address(0)} --master-port {port} --local-addr {self.net.address(node)}
        """.split()
        command = [*self.net.inside(node), sys.executable, *launcher, *self.training(self.job_root(node))]
        return command, {
            "FLASHPOINT_COPIES": "1",
            "FLASHPOINT_AGENT_HOST": self.net.address(node),
            "GLOO_SOCKET_IFNAME": self.net.interface,
            NODE_TAG: str(self.memories[node].path),
        }

    def job_root(self, node: int) -> Path:
        return self.memories[node].path / "job"

    def versions(self, node: int) -> list[int]:
        """Steps in a node's memory."""
        return sorted(int(path.name[5:-5]) for path in self.job_root(node).glob("step-*_ckpt"))

    def settled_versions(self) -> list[list[int]]:
        """The versions of every node, when the agents have put them in order after the job's end."""
        deadline = time.time() + 30
        while True:
            held = [self.versions(node) for node in range(self.nodes)]
            if all(versions == held[0] and len(versions) == 1 for versions in held) or time.time() > deadline:
                return held
            time.sleep(0.05)

    def replicated(self) -> int:
        """The newest step of which every rank has said that it is replicated; 0 if there is none."""
        ranks = [self.events(self.attempt, rank) for rank in range(self.ranks)]
        return min(max((e["version"] for e in one if "replicated" in e), default=0) for one in ranks)

    def lose(self, node: int) -> None:
        """The node dies for good, and a new one, empty, takes its place."""
        memory = self.memories[node]
        self.sweep(NODE_TAG, str(memory.path))
        had = memory.used()
        memory.pull_out()
        memory.plug_in()
        say(
            f"node {node} is lost: its agent killed, its memory ({had / 1e6:.0f} MB) gone. In its place: "
            f"a new node with {len(self.versions(node))} versions"
        )

    def clean_up(self) -> None:
        self.sweep()
        for memory in self.memories:
            memory.pull_out()


def demo(work: Path, net: Loopback | Namespaces, steps: int, save_every: int, seed: int) -> bool:
    settings = {"steps": steps, "save_every": save_every, "seed": seed}
    with ExitStack() as stack, console.status("starting") as status:
        begun = time.time()
        calm = NodesRun(work / "undisturbed", net, **settings)
        stack.callback(calm.clean_up)
        where = "memories mounted" if calm.memories[0].is_mounted else "folders"
        say(f"{NODES} nodes on this host: {where}, {net.name}, an agent each; every object has a copy")
        calm.start()
        calm.until(steps + 1, status)
        calm.clean_up()  # its memory is wanted
        say(f"undisturbed: {steps} steps in {time.time() - begun:.0f} s")

        lossy = NodesRun(work / "lossy", net, **settings)
        stack.callback(lossy.clean_up)
        lossy.start()
        # A loss in the first save's time would find no copy yet, and that is no accident to recover from.
        after = random.randint(2 * save_every + 1, steps - save_every)
        while lossy.until(after, status) and not lossy.replicated():
            after += 1
        time.sleep(random.uniform(0, 1) * calm.step_seconds())
        lossy.kill()
        if not lossy.kills:
            raise DemoFailed("the run was over before it could be killed")
        lost = random.randrange(NODES)
        lossy.lose(lost)
        lossy.start()
        lossy.until(steps + 1, status)
        held = lossy.settled_versions()

    kill, again = lossy.kills[0], lossy.recovery(0)
    equal, of = equal_losses(calm, lossy)
    lost_steps, gap_s = kill["step"] - again["step"], again["training"] - kill["at"]
    say(
        f"started again: every rank goes on from step {again['step']} ({lost_steps} steps lost), from a "
        f"{again['tiers'][lost]}'s memory, in {again['seconds']:.2f} s; next step done {gap_s:.1f} s after the kill"
    )
    saves = [save for save in calm.saves() + lossy.saves() if "replicated" in save]
    if saves:
        blocking, complete, replicated = (
            1e3 * statistics.median(save[name] for save in saves)
            for name in ("blocking", "complete", "replicated")
        )
        say(
            f"a save of {saves[0]['bytes'] / 1e6:.0f} MB blocks for {blocking:.0f} ms; it is complete after "
            f"{complete:.0f} ms, replicated after {replicated:.0f} ms, while training goes on"
        )
    if len(set(map(tuple, held))) > 1 or not held[lost]:
        raise DemoFailed(f"the nodes hold different versions in the end: {held}")
    if "peer" not in again["tiers"]:
        raise DemoFailed("no rank says that its state came from a peer")
    say(f"losses: {equal} of {of} bit-identical with the undisturbed run")
    return equal == of


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument(
        "--seed", type=int, default=1, help="of the training; kill and lost node are random each time"
    )
    parser.add_argument("--plain", action="store_true", help="loopback addresses even for root")
    args = parser.parse_args()
    if args.steps < 4 * args.save_every:
        parser.error("there must be at least four saves")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # clean up on a polite kill, too
    work = Path(f"/dev/shm/flashpoint-demo-{os.getpid()}")
    work.mkdir(mode=0o700)
    begun = time.time()
    try:
        with network(args.plain) as net:
            same = demo(work, net, args.steps, args.save_every, args.seed)
    except KeyboardInterrupt:
        return 130
    except DemoFailed as error:
        say(str(error), style="red", markup=False)
        return 1
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if not same:
        say("the losses of the two runs differ", style="bold red")
        return 1
    say(f"[bold green]every loss is bit-identical[/bold green] ({time.time() - begun:.0f} s in all)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
