"""Write the tensors of a version as a folder that other tools read, out of memory, a few MiB at a time.

  safetensors   model.safetensors, or several files with an index where --max-shard-size is reached
  huggingface   the same, with the model's configuration and tokenizer files: --config FOLDER
  orbax         a checkpoint as stock Orbax reads it: needs flashpoint[jax]

Sharded tensors are put together; what is read is verified. OUT gets its name when all of it is written, and is never
overwritten. Pickled objects and plain values are left out, and told; but an Orbax checkpoint has the numbers among the
plain values.

JSON:
  container, step, out, format, files, tensors, bytes, seconds
  left_out[]    names of what is no tensor
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any, Final

from flashpoint.cli.arguments import size
from flashpoint.cli.exit_codes import FINE, RefusedError
from flashpoint.cli.output import Page, first_few, plural, print_json
from flashpoint.cli.progress import Advance, progress_bar
from flashpoint.dtypes import DTYPES
from flashpoint.errors import CheckpointNotFoundError, FlashpointError
from flashpoint.export.folder import write_folder
from flashpoint.export.safetensors_files import Item, plan_files
from flashpoint.export.selection import Selection
from flashpoint.memory import human_bytes
from flashpoint.view import open_container

NAME: Final = "export"
HELP: Final = "write a version for other tools: safetensors, Hugging Face, Orbax"
FORMATS: Final = ("safetensors", "huggingface", "orbax")

_CONFIG: Final = "config.json"
_FLOATS: Final = tuple(name for name in DTYPES if name.startswith(("float", "bfloat")) and DTYPES[name].code)
# What a model's folder has beside the weights, as Transformers names it.
_BESIDE: Final = (
    "generation_config.json", "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model",
    "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja",
)  # fmt: skip


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("container", metavar="CONTAINER", help="a version's folder, .../step-<n>_ckpt")
    parser.add_argument("out", metavar="OUT", help="a folder that does not exist yet")
    parser.add_argument("--format", choices=FORMATS, required=True)
    parser.add_argument(
        "--prefix", default="", help="only tensors whose names begin so; it is left out of their names"
    )
    parser.add_argument("--name", metavar="GLOB", help="only tensors whose names match")
    parser.add_argument(
        "--dtype", choices=_FLOATS, metavar="DTYPE", help=f"cast floats to: {', '.join(_FLOATS)}"
    )
    parser.add_argument(
        "--max-shard-size",
        type=size,
        default=5 << 30,
        metavar="SIZE",
        help="of a safetensors file (default: 5GiB)",
    )
    parser.add_argument(
        "--config", metavar="PATH", help="huggingface: config.json, or a folder with it and a tokenizer"
    )
    parser.add_argument(
        "--rank", type=int, default=0, help="whose copy, where every rank saved its own (default: 0)"
    )


def run(args: argparse.Namespace) -> int:
    start_s = time.perf_counter()
    out = os.path.abspath(args.out)
    if os.path.lexists(out):
        raise RefusedError(f"{out} is there already: give a folder that is not")
    if (args.format == "huggingface") != (args.config is not None):
        raise FlashpointError(
            "--format huggingface needs --config, the model's config.json, and no other format does"
        )
    extras = _model_files(args.config) if args.config is not None else {}
    with open_container(os.path.abspath(args.container), rank=args.rank) as view:
        selection = Selection(view, prefix=args.prefix, pattern=args.name, dtype=args.dtype)
        with progress_bar("exporting", selection.nbytes) as advance:
            if args.format == "orbax":
                left_out = _orbax(out, selection, advance)
            else:
                left_out = selection.left_out
                _safetensors(out, selection, extras, args.max_shard_size, advance)
        report = {
            "container": view.container.path,
            "step": view.manifest.step,
            "out": out,
            "format": args.format,
            "files": sum(len(files) for _, _, files in os.walk(out)),
            "tensors": len(selection.items),
            "bytes": selection.nbytes,
            "left_out": left_out,
            "seconds": time.perf_counter() - start_s,
        }
    if args.json:
        print_json(report)
    else:
        _show(report)
    return FINE


def _safetensors(
    out: str, selection: Selection, extras: dict[str, bytes], max_shard_bytes: int, advance: Advance
) -> None:
    files = plan_files(selection.items, max_shard_bytes=max_shard_bytes)
    if _CONFIG in extras:
        floats = {item.dtype for item in selection.items if item.dtype in _FLOATS}
        extras[_CONFIG] = _with_dtype(extras[_CONFIG], floats.pop() if len(floats) == 1 else None)

    def slabs(item: Item):  # type: ignore[no-untyped-def]
        for slab in selection.slabs(item):
            yield slab
            advance(len(slab))

    write_folder(out, files, slabs, extras)


def _orbax(out: str, selection: Selection, advance: Advance) -> list[str]:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # no device is needed, and none is taken from training
    try:
        from flashpoint_jax.export import export_orbax
    except ImportError as error:
        raise FlashpointError(
            f"--format orbax needs JAX and Orbax ({error}): pip install 'flashpoint[jax]'"
        ) from None
    return export_orbax(out, selection, advance)


def _model_files(path: str) -> dict[str, bytes]:
    """``config.json`` and what lies beside it, by name."""
    folder = path if os.path.isdir(path) else os.path.dirname(os.path.abspath(path))
    config = os.path.join(path, _CONFIG) if os.path.isdir(path) else path
    found = {}
    for name, file_path in {
        _CONFIG: config,
        **{name: os.path.join(folder, name) for name in _BESIDE},
    }.items():
        try:
            with open(file_path, "rb") as file:
                found[name] = file.read()
        except FileNotFoundError:
            if name == _CONFIG:
                raise CheckpointNotFoundError(f"--config: there is no {file_path}") from None
    _with_dtype(found[_CONFIG], None)  # before anything is written
    return found


def _with_dtype(config: bytes, dtype: str | None) -> bytes:
    """The configuration, with the dtype of the exported tensors in it."""
    try:
        content: Any = json.loads(config)
        if "model_type" not in content:
            raise ValueError("it has no model_type")
    except (ValueError, TypeError) as error:
        raise FlashpointError(f"--config is no configuration of a model: {error}") from None
    if dtype is not None:
        content["torch_dtype" if "torch_dtype" in content else "dtype"] = dtype
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def _show(report: dict[str, Any]) -> None:
    page = Page()
    rate = report["bytes"] / report["seconds"] / (1 << 30)
    page.line(
        (report["out"], "bold"),
        f"  step {report['step']} as {report['format']}: {plural(report['tensors'], 'tensor')}, "
        f"{plural(report['files'], 'file')}, {human_bytes(report['bytes'])} in {report['seconds']:.2f} s, "
        f"{rate:.2f} GiB/s",
    )
    if report["left_out"]:
        names = first_few([repr(name) for name in report["left_out"]])
        page.line((f"  left out, as no tensors: {names}", "yellow"))
    page.show()
