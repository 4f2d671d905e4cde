"""Run every command of docs/cli.md that needs no framework, on jobs made for it, and print what they say.

    python scripts/cli_transcripts.py

Paths are shown as a reader would have them. As root, a small tmpfs is mounted to be filled; else that part is left out.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import msgspec  # noqa: E402
import numpy as np  # noqa: E402

from flashpoint.config import FlashpointConfig  # noqa: E402
from flashpoint.objects import CheckpointObjectManager  # noqa: E402
from flashpoint.saver import MLFlashpointCheckpointSaver  # noqa: E402
from flashpoint.storage import claim  # noqa: E402
from tests.core.replication.nodes import Nodes  # noqa: E402
from tests.core.world import Job, contents  # noqa: E402

SHOWN: dict[str, str] = {}
"""Real path -> what stands in its place."""


def show(title: str) -> None:
    print(f"\n#### {title}\n")


def flashpoint(*args: str, quiet: bool = False) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "flashpoint", *args],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, cwd=ROOT,
    )  # fmt: skip
    if quiet:
        return
    text = f"$ flashpoint {' '.join(args)}\n{result.stdout}"
    if result.returncode:
        text += f"$ echo $?\n{result.returncode}\n"
    for path, shown in sorted(SHOWN.items(), key=lambda item: -len(item[0])):
        text = text.replace(path, shown)
    print(text)


def save(root: str, step: int, nbytes: int = 4 << 20) -> None:
    saver = MLFlashpointCheckpointSaver(
        CheckpointObjectManager(root, config=FlashpointConfig(keep=0, prefault=False))
    )
    saver.save(step, {"weight": np.zeros(nbytes // 4, np.float32)}, {"step": step})
    saver.objects.close()


def job_of_four() -> None:
    with (
        tempfile.TemporaryDirectory() as storage,
        Nodes(
            4,
            processes=[2, 3],
            copies=1,
            keep=2,
            nbytes=4 << 20,
            storage=f"file://{storage}",
            storage_every_n=3,
        ) as nodes,
    ):
        SHOWN.update({storage: "/mnt/checkpoints/job-1"})
        SHOWN.update({node.job_root: "/dev/shm/job-1" for node in nodes})
        nodes.start(configure=False)
        claim.claim(nodes.config, nodes[0].job_root, nodes.keys.job, nodes.epoch, None)
        membership = nodes.membership()
        members = tuple(
            msgspec.structs.replace(one, domain=f"rack-{'ab'[one.index // 2]}") for one in membership.members
        )
        nodes.configure(msgspec.structs.replace(membership, members=members))
        root = nodes[0].job_root
        for step in (100, 200):
            nodes.save(step)
            nodes.replicated(step)
        wait(lambda: nodes[0].client.inquire().storage.step == 100)
        show("healthy")
        flashpoint("ls", root)
        flashpoint("status", root)
        show("in use")
        flashpoint("rm", root, "100", "--yes")
        flashpoint("rm", "--job", root, "--yes")
        show("a node is silent")
        nodes[2].kill()
        nodes.save(300)
        time.sleep(3)
        flashpoint("status", root)
        show("its own agent is dead")
        flashpoint("status", nodes[2].job_root)


def wait(condition) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def two_nodes() -> None:
    with scratch() as folder, tempfile.TemporaryDirectory() as storage:
        roots = [f"{folder}/{node}/job-4" for node in ("a", "b")]
        SHOWN.update(dict.fromkeys(roots, "/dev/shm/job-4") | {storage: "/mnt/checkpoints/job-4"})
        job = Job(roots[0], 2, roots=roots)
        job.each(lambda rank: rank.save(70, contents(70, rank.rank, 1 << 20), {"step": 70}))
        job.close()
        show("drained from two nodes")
        for root in (*roots, roots[0]):
            flashpoint("drain", root, "--to", storage)


def dead_jobs() -> None:
    with scratch() as folder:
        root, empty = f"{folder}/job-2", f"{folder}/empty"
        SHOWN.update({root: "/dev/shm/job-2", empty: "/dev/shm/empty", folder: "/dev/shm"})
        os.mkdir(empty, 0o700)
        for step in (10, 20, 30):
            save(root, step)
        Path(root, "step-30_ckpt", ".metadata").write_bytes(b"{}\n")
        show("corrupt")
        flashpoint("ls", root)
        flashpoint("status", root)
        flashpoint("drain", root, "--to", f"{folder}/nowhere")
        flashpoint("drain", root, "--to", empty)
        show("removed")
        flashpoint("rm", root, "10", "20", "--yes")
        flashpoint("rm", root, "10", "--yes")
        flashpoint("rm", root, "30")
        flashpoint("rm", "--job", root, "--yes")
        flashpoint("rm", "--job", root, "--yes", "--force")
        show("empty")
        other = f"{folder}/nothing"
        os.mkdir(other, 0o700)
        SHOWN.update({other: "/dev/shm/empty"})
        flashpoint("ls", other)
        flashpoint("status", other)
        flashpoint("rm", "--job", other, "--yes")
        flashpoint("drain", other, "--to", "/mnt/checkpoints")
        flashpoint("doctor", other, "--quick")


def looking() -> None:
    with scratch() as folder:
        root = f"{folder}/job-5"
        SHOWN.update({root: "/dev/shm/job-5", folder: "/dev/shm"})
        objects = CheckpointObjectManager(root, config=FlashpointConfig(keep=0, prefault=False))
        saver = MLFlashpointCheckpointSaver(objects)
        rng = np.random.default_rng(0)
        weight, bias = rng.standard_normal((1024, 1024), np.float32), np.zeros(1024, np.float32)
        for step in (100, 200):
            saver.save(step, {"layer.weight": weight, "layer.bias": bias}, {"step": step, "lr": 1e-3})
            weight = weight + np.float32(1e-3) * rng.standard_normal((1024, 1024), np.float32)
        objects.close()
        show("looking")
        flashpoint("inspect", f"{root}/step-200_ckpt")
        flashpoint("inspect", f"{root}/step-200_ckpt", "layer.weight")
        flashpoint("diff", f"{root}/step-100_ckpt", "200")
        flashpoint("verify", root)
        with open(f"{root}/step-100_ckpt/rank00000-0.safetensors", "r+b") as file:
            file.seek(1 << 20)
            file.write(b"flipped")
        flashpoint("verify", root)
        flashpoint("export", f"{root}/step-200_ckpt", f"{folder}/out", "--format", "safetensors")
        flashpoint("bench", root, "--bytes", "64MiB", "--repeats", "3")
        flashpoint("plan", "--params", "8e9", "--nodes", "16", "--step", "2s")
        flashpoint("simulate", "--seeds", "100", "--nodes", "4")
        flashpoint("agent", root, "--stop")


def full() -> None:
    with scratch() as folder:
        place = f"{folder}/mem"
        SHOWN.update({place: "/mnt/flashpoint"})
        show("mounted")
        flashpoint("mount", place, "--size", "64M", "--do", "--user", "1000")
        if not os.path.ismount(place):
            return
        try:
            os.chown(place, os.geteuid(), -1)
            save(f"{place}/job-3", 10, 40 << 20)
            with contextlib.suppress(OSError), open(f"{place}/core.4711", "wb") as file:
                while True:
                    file.write(bytes(1 << 20))
            show("full")
            flashpoint("ls", place)
            flashpoint("doctor", f"{place}/job-3", "--quick")
            flashpoint("status", f"{place}/job-3")
            os.mkdir(f"{folder}/disk")
            SHOWN.update({f"{folder}/disk": "/mnt/checkpoints/job-3"})
            flashpoint("drain", f"{place}/job-3", "--to", f"{folder}/disk")
            flashpoint("rm", "--job", f"{place}/job-3", "--yes", "--force")
        finally:
            subprocess.run(["umount", place], check=True)


def printed() -> None:
    show("printed")
    flashpoint("mount", "/mnt/flashpoint", "--size", "16G", "--user", "1000")
    flashpoint("--help")


@contextlib.contextmanager
def scratch() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="flashpoint-transcripts-", dir="/dev/shm")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    for part in (job_of_four, two_nodes, looking, dead_jobs, full, printed):
        part()
