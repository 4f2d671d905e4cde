"""Train a small GPT with Flashpoint, and pick the work up again after a SIGKILL.

    python examples/train_gpt.py            the whole demo (see run_demo.py): train once in peace and once
                                            with two kills, then compare every loss of the two, bit for bit
    torchrun --nproc-per-node 2 examples/train_gpt.py train --root /dev/shm/my-job
                                            only the training; kill it, start it again: it resumes

The model is a plain decoder-only transformer that reads bytes; the text is the source of Python's own
standard library. `AppState` below says what is saved, and Flashpoint is four lines of `train`: [1] to [4].
"""

import argparse
import math
import random
import sys

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from journal import Journal
from real_text import standard_library
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import flashpoint_torch as fpt

LAYERS, HEADS, WIDTH, CONTEXT = 4, 8, 512, 64  # 12.9 million parameters; with AdamW's, 155 MB to save
VOCABULARY = 256  # every byte is a token
BATCH, DROPOUT, LEARNING_RATE, WARM_UP = 4, 0.1, 1e-3, 10  # BATCH is that of one rank
NOISE = 0.02  # the part of the input bytes that is blotted out


# --- model and data ---


class Block(nn.Module):
    """One transformer layer: causal self-attention, then a two-layer perceptron, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(seen.transpose(1, 2).reshape(batch, length, WIDTH)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:  # as in GPT-2: small, and smaller where a layer adds its result
                adds = name.endswith(("out.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * LAYERS) if adds else 1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x)))


class Data:
    """This rank's part of the text, in windows of CONTEXT bytes, shuffled anew for each epoch."""

    def __init__(self, text: torch.Tensor, rank: int, world: int, dice: np.random.Generator) -> None:
        self.text = text.tensor_split(world)[rank]
        self.dice, self.position = dice, 0
        self.order = torch.from_numpy(dice.permutation(len(self.text) // CONTEXT - 2))

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.position + BATCH > len(self.order):
            self.position, self.order = 0, torch.from_numpy(self.dice.permutation(len(self.order)))
        windows = self.order[self.position : self.position + BATCH].tolist()
        self.position += BATCH
        starts = [window * CONTEXT + random.randrange(CONTEXT) for window in windows]
        rows = torch.stack([self.text[start : start + CONTEXT + 1] for start in starts]).long()
        blots = torch.from_numpy(self.dice.random((BATCH, CONTEXT)) < NOISE)
        return rows[:, :-1].masked_fill(blots, ord(" ")), rows[:, 1:]


# --- what is saved ---


class AppState(Stateful):
    """Everything that decides the next step: what is left out here makes a resumed run go another way.

    Model and optimizer are sharded (DTensors). The rest is small and belongs to one rank: plain tensors,
    numbers, tuples, dicts; each rank gets its own back.
    """

    def __init__(self, model, optimizer, schedule, data: Data) -> None:
        self.model, self.optimizer, self.schedule, self.data = model, optimizer, schedule, data
        self.step = 0  # steps done

    def state_dict(self) -> dict:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "schedule": self.schedule.state_dict(),
            "data": {"order": self.data.order, "position": self.data.position},
            "dice": {  # dropout throws torch's, windows start by python's, order and blots are numpy's
                "torch": torch.get_rng_state(),
                "python": random.getstate(),
                "numpy": self.data.dice.bit_generator.state,
            },
            "step": self.step,
        }

    def load_state_dict(self, state: dict) -> None:
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        self.schedule.load_state_dict(state["schedule"])
        self.data.order, self.data.position = state["data"]["order"], state["data"]["position"]
        torch.set_rng_state(state["dice"]["torch"])
        random.setstate(state["dice"]["python"])
        self.data.dice.bit_generator.state = state["dice"]["numpy"]
        self.step = state["step"]


# --- training ---


def train(root: str, steps: int, save_every: int, seed: int, journal: Journal) -> None:
    torch.set_num_threads(1)  # the order of additions, and so the last bit, hangs on the number of threads
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid of the line above, and slow
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(seed)  # the same weights on every rank, before they are sharded
    model = GPT()
    mesh = init_device_mesh("cpu", (world,))
    for part in [*model.blocks, model]:
        # Small enough to stay gathered between forward and backward.
        fully_shard(part, mesh=mesh, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warm_up_and_cosine(step, steps))

    torch.manual_seed(seed + 1 + rank)  # from here on every rank throws its own dice
    random.seed(seed + 1 + rank)
    text = torch.frombuffer(standard_library(), dtype=torch.uint8)
    data = Data(text, rank, world, np.random.default_rng(seed + 1 + rank))

    app, save = AppState(model, optimizer, schedule, data), None
    with fpt.init(root, keep=1) as fp:  # [1] on every rank, once the process group is there
        found = fp.recover({"app": app})  # [2] `app` is as in the newest complete step; None if there is none
        if found:
            journal.write(resumed=found.step, tier=found.tier, seconds=found.seconds)

        while app.step < steps:
            tokens, targets = data.next()
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            app.step += 1
            journal.write(step=app.step, loss=loss.item().hex())

            if app.step % save_every == 0 or app.step == steps:
                finish(save, journal)  # the save before this one, complete long ago as a rule
                save = fp.async_save({"app": app}, step=app.step)  # [3] back as soon as the state is copied
        finish(save, journal)


def warm_up_and_cosine(step: int, steps: int) -> float:
    """The factor of the learning rate: up to 1 in a line, then down to 0.1 along half a cosine."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.55 + 0.45 * math.cos(math.pi * (step - WARM_UP) / max(1, steps - WARM_UP))


def finish(save, journal: Journal) -> None:
    """Wait for a save that was started earlier: one that fails must be heard of, not passed over."""
    if save is None:
        return
    if not save.wait("complete", timeout_s=60):  # [4]
        raise save.error or TimeoutError("a save was not complete after 60 s")
    journal.write(saved=save.nbytes, version=save.step, **save.timings)


def main() -> int:
    if sys.argv[1:2] != ["train"]:
        import run_demo

        return run_demo.main()
    parser = argparse.ArgumentParser(prog="train_gpt.py train", description="What torchrun starts.")
    parser.add_argument("--root", required=True, help="the job's folder, best in memory (/dev/shm/...)")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--journal", help="write <this>-rank<n>.jsonl instead of printing rank 0's events")
    args = parser.parse_args(sys.argv[2:])

    dist.init_process_group("gloo")
    train(args.root, args.steps, args.save_every, args.seed, Journal(args.journal, dist.get_rank()))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
