"""Nothing in the packages unpickles or executes bytes: read from their source, with every exception and its reason."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("flashpoint", "flashpoint_torch", "flashpoint_jax")
MODULES = frozenset(
    {"pickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib", "multiprocessing", "yaml", "code",
     "runpy"}
)  # fmt: skip
NAMES = frozenset({"eval", "exec", "compile", "__import__"})
# Collectives of torch.distributed that unpickle what other ranks send; executors that unpickle what processes do.
ATTRIBUTES = frozenset(
    {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
     "recv_object_list", "ProcessPoolExecutor", "unsafe_load", "full_load", "Unpickler", "import_module"}
)  # fmt: skip

ALLOWED = {
    ("flashpoint/cli/simulate.py", "ProcessPoolExecutor"): "the simulator's own processes, seeds in and outcomes out",
    ("flashpoint_torch/supervise.py", "multiprocessing"): "starts the training function; nothing is read back",
    ("flashpoint_torch/restore.py", "torch.load"): "weights_only unless the user gives allow_pickle=True",
    ("flashpoint_torch/hf_trainer.py", "broadcast_object_list"): "a path, over the training's own process group",
    ("flashpoint_torch/lightning.py", "broadcast_object_list"): "a path, over the training's own process group",
    ("flashpoint_torch/megatron.py", "broadcast_object_list"): "a file's bytes, over the training's own process group",
    ("flashpoint_torch/staged_state.py", "torch.load"): "what this job's other process wrote a moment ago, to no file",
}  # fmt: skip


def found_in(source: str) -> Iterator[tuple[str, int]]:
    """(what, line) of everything that might unpickle or execute."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in MODULES or alias.name.startswith("torch.multiprocessing"):
                    yield alias.name.split(".")[0], node.lineno
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").split(".")[0]
            if module in MODULES:
                yield module, node.lineno
            for alias in node.names:
                if alias.name in ATTRIBUTES or (node.module, alias.name) in (
                    ("torch", "load"),
                    ("numpy", "load"),
                ):
                    yield alias.name, node.lineno
        elif isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
            yield node.attr, node.lineno
        elif isinstance(node, ast.Name) and node.id in ATTRIBUTES:
            yield node.id, node.lineno
        elif isinstance(node, ast.Call):
            yield from _in_call(node)


def _in_call(node: ast.Call) -> Iterator[tuple[str, int]]:
    options = {option.arg: option.value for option in node.keywords}
    called = ast.unparse(node.func)
    if called in NAMES:
        yield called, node.lineno
    if called == "torch.load" and not _is_constant(options.get("weights_only"), True):
        yield called, node.lineno
    if called in ("np.load", "numpy.load") and not _is_constant(options.get("allow_pickle"), False):
        yield called, node.lineno


def _is_constant(value: ast.expr | None, wanted: bool) -> bool:
    return isinstance(value, ast.Constant) and value.value is wanted


@pytest.mark.fault(38)
def test_nothing_unpickles_or_executes() -> None:
    found = {}
    for package in PACKAGES:
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            name = str(path.relative_to(REPOSITORY))
            for what, line in found_in(path.read_text()):
                found.setdefault((name, what), f"{name}:{line}: {what}")
    assert not {place: text for place, text in found.items() if place not in ALLOWED}
    assert not ALLOWED.keys() - found.keys(), "no longer needed: take it off the list"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from pickle import loads", "import cloudpickle as c", "import dill", "import shelve",
        "def f():\n    import marshal", "torch.load(f)", "torch.load(f, weights_only=False)",
        "torch.load(f, weights_only=flag)", "np.load(f, allow_pickle=True)", "np.load(f)", "yaml.unsafe_load(x)",
        "eval(x)", "exec(x)", "from torch import load", "from multiprocessing.connection import Client",
        "dist.all_gather_object(a, b)", "from torch.distributed import broadcast_object_list",
        "importlib.import_module(x)",
        "import torch.multiprocessing as mp", "__import__(name)",
    ],
)  # fmt: skip
def test_the_search_finds(source: str) -> None:
    assert list(found_in(source))


@pytest.mark.parametrize(
    "source", ["torch.load(f, weights_only=True)", "np.load(f, allow_pickle=False)", "re.compile(x)"]
)
def test_the_search_leaves_alone(source: str) -> None:
    assert not list(found_in(source))
