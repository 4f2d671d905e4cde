"""The code of the documentation runs as written, and the pages build without a broken link.

What a page leaves to its reader (a model, a data loader) is defined here, before its blocks; where it writes ``...``
stands here what a reader would do.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TIMEOUT_S = 200

TORCH = """
import torch
import flashpoint_torch as fpt
torch.manual_seed(1)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
state = {"model": model, "step": 7}
"""
JAX = """
import jax, jax.numpy as jnp, orbax.checkpoint as ocp, flashpoint_jax
options = ocp.CheckpointManagerOptions()
state = {"params": {"dense": {"kernel": jnp.ones((8, 4))}}}
initial_state, step = state, 100
abstract_state = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
stock_manager_over_long_term_storage = None
"""
LLAMA = """
from transformers import AutoModelForCausalLM, LlamaConfig
sizes = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1, vocab_size=32)
model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes))
"""


@dataclass
class Example:
    """Python blocks of one page, or of one of its sections, as one program.

    Attributes:
        only_begin: what stands before the page's first section.
        before: what the reader has defined.
        dots: what stands where the page has a line of three dots.
        after: what the page claims.
        changed: text of the page -> what it is here.
        needs: a package without which it cannot run.
    """

    page: str
    section: str = ""
    only_begin: bool = False
    before: str = ""
    dots: str = "pass"
    after: str = ""
    changed: dict[str, str] = field(default_factory=dict)
    needs: str = "torch"

    @property
    def text(self) -> str:
        text = (DOCS / self.page).read_text()
        for mark in ("\n## ", "\n### "):
            if f"{mark}{self.section}\n" in text:
                return text.split(f"{mark}{self.section}\n")[1].split(mark)[0]
        assert not self.section, f"{self.page} has no section {self.section}"
        return text.split("\n## ")[0] if self.only_begin else text

    @property
    def blocks(self) -> list[str]:
        return re.findall(r"```python\n(.*?)```", self.text, re.DOTALL)


EXAMPLES = {
    "first page": Example("index.md", after="assert fp.steps() == [30]"),
    "recover": Example(
        "recover.md",
        before=f"""{TORCH}
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
loader = torch.utils.data.DataLoader(torch.randn(10, 8))
loader.state_dict, loader.load_state_dict = dict, lambda state: None
total, config = 300, fpt.RecoverConfig()
open("train.py", "w").write("pass")
def train(batch):
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
    schedule.step()
""",
        after="assert step.global_step == 300",
    ),
    "export": Example(
        "huggingface.md",
        before=f"""{TORCH}{LLAMA}
import os
from transformers import PreTrainedTokenizerFast
from tokenizers import Tokenizer, models
os.makedirs("data")
PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({{"a": 0}}))).save_pretrained("data/tokenizer")
fp, config = fpt.init("/dev/shm/job-1"), fpt.RecoverConfig(mode="on", freq_epochs=1)
optimizer = torch.optim.AdamW(model.parameters())
""",
        dots="""
step = fpt.StepInfo.first(steps_per_epoch=100)
for _ in range(100):
    optimizer.zero_grad()
    model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()
    recover.dump(step)
    step = step.next()
""",
        after="fp.close()",
        changed={'"/data/': '"data/'},
        needs="transformers",
    ),
    "lightning": Example(
        "lightning.md",
        before=f"""{TORCH}
import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 8)
    def training_step(self, batch):
        self.trainer.should_stop = self.global_step >= 20
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.randn(10, 8))
model = Model()
""",
        after="assert trainer.global_step >= 20",
        needs="lightning",
    ),
    "trainer": Example(
        "huggingface-trainer.md",
        before=f"""{TORCH}{LLAMA}
from transformers import Trainer, TrainingArguments
args = TrainingArguments("out", max_steps=12, report_to=[], save_strategy="no", use_cpu=True)
texts = [{{"input_ids": torch.arange(8), "labels": torch.arange(8)}}] * 100
""",
        after="assert trainer.state.global_step == 12",
        needs="transformers",
    ),
    "megatron": Example(
        "megatron.md",
        before=f"""{TORCH}
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
sharded_state, step = {{"w": ShardedTensor.from_rank_offsets("w", torch.ones(8), (0, 0, 1))}}, 100
""",
        after="assert memory.resume().step == 100",
        needs="megatron",
    ),
    "storage": Example(
        "storage.md",
        before=f"{TORCH}\nimport os\nos.makedirs('bucket/job-1')\n",
        dots="fp.save(state, 9)",
        changed={"s3://bucket": f"file://{'{cwd}'}/bucket"},
    ),
    "observability": Example(
        "observability.md", before=TORCH, after='fpt.init("/dev/shm/job-1").save(state, 9)'
    ),
    "orbax": Example(
        "jax.md",
        only_begin=True,
        before=JAX,
        after='assert state["params"]["dense"]["kernel"].shape == (8, 4)',
        needs="orbax",
    ),
    "orbax v1": Example("jax.md", "Orbax v1", before=JAX, needs="orbax"),
    "tensorstore": Example(
        "tensorstore.md",
        before=f"""{JAX}
with ocp.Checkpointer(flashpoint_jax.FlashpointStandardHandler()) as checkpointer:
    checkpointer.save("/dev/shm/job-1/step-100_ckpt", args=ocp.args.StandardSave(state))
""",
        needs="tensorstore",
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_code_of_a_page_runs_as_written(name: str, job_root: str, tmp_path: Path) -> None:
    example = EXAMPLES[name]
    if importlib.util.find_spec(example.needs) is None:
        pytest.skip(f"{example.needs} is not installed")
    code = "\n".join(example.blocks)
    dots = re.compile(r"^( *)\.\.\.$", re.MULTILINE)
    code = dots.sub(lambda found: re.sub("^", found[1], example.dots, flags=re.MULTILINE), code)
    for old, new in example.changed.items():
        assert old in code, f"{example.page} has no {old!r} any more"
        code = code.replace(old, new.format(cwd=tmp_path))
    program = "\n".join([example.before, code, example.after]).replace("/dev/shm/job-", f"{job_root}/job-")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=tmp_path,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(ROOT),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        },
        check=False,
    )
    assert done.returncode == 0, f"{program}\n{done.stderr}"


def test_the_pages_build_without_a_warning(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mkdocs",
            "build",
            "--strict",
            "--quiet",
            "--site-dir",
            str(tmp_path / "site"),
        ],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "async_save" in (tmp_path / "site" / "index.html").read_text()
    assert "failure_domain" in (tmp_path / "site" / "api" / "index.html").read_text()
