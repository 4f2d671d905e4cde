"""Small real models of Transformers, made from a configuration, and programs that export them and are killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedModel

import flashpoint_torch as fpt
from tests.torch.faults import Log

VOCABULARY = 96


def llama(*, seed: int = 0, tied: bool = False, hidden: int = 32) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config)


def gpt2(*, seed: int = 0) -> PreTrainedModel:
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=32, n_layer=2, n_head=4)
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config)


def train_step(model: Any, optimizer: torch.optim.Optimizer, step: int) -> float:
    tokens = torch.randint(VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(step))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def export_for_ever(rank: int, job_root: str, root: str, log_path: str) -> None:
    """One export after the other, until it is killed."""
    log = Log(log_path)
    with fpt.init(job_root) as fp:
        model = llama(hidden=64)
        saver = fpt.Saver(fp, root, fpt.SaverConfig(max_shard_bytes="40KiB", mode="sync"), model=model)
        step = fpt.StepInfo(0, 0, 10_000 * fp.epoch, 5)
        while True:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(step.global_step)
            handle = fp.async_save({"engine": {"model": model.state_dict()}}, step.global_step)
            log.write("exporting", saver.path(step))
            export = saver.export(step, handle)
            assert export is not None and export.done(), export
            log.write("exported", export.path)
            step = step.next()


def folders(root: str | Path) -> list[Path]:
    """Exports under their final names."""
    return sorted(path for path in Path(root).iterdir() if not path.name.startswith("."))
