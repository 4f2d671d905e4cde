"""`flashpoint export` of what PyTorch saved: read by Transformers, equal to the last bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import flashpoint_torch as fpt
from flashpoint import cli
from tests.torch.exporting import llama


@pytest.mark.parametrize("tied", [False, True])
def test_from_pretrained_reads_an_export(job_root: str, tmp_path: Path, capsys: Any, tied: bool) -> None:
    model = llama(tied=tied).to(torch.bfloat16)
    model.config.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    with fpt.init(job_root) as fp:
        fp.save({"model": model.state_dict(), "lr": 0.1}, step=7)
        args = ["--format", "huggingface", "--config", tmp_path / "model", "--prefix", "model."]
        args += ["--max-shard-size", "20KiB"]
        assert cli.main([str(arg) for arg in ("export", fp.path(7), tmp_path / "out", *args)]) == 0
    out = tmp_path / "out"
    assert len(list(out.glob("*.safetensors"))) > 2
    assert (out / "tokenizer.json").read_text() == "{}"
    loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    old, new = model.state_dict(), loaded.state_dict()
    assert old.keys() == new.keys()
    for name in old:
        assert old[name].dtype == new[name].dtype == torch.bfloat16
        assert torch.equal(old[name].view(torch.int16), new[name].view(torch.int16))
    capsys.readouterr()
