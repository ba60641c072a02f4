"""Nothing in the package unpickles, whatever it reads: the syntax trees of all its modules are searched."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import planaria

ROOT = Path(planaria.__file__).parent

# Modules whose loaders run what the data says, or that unpickle what comes over a connection of their own.
MODULES = {
    "pickle", "_pickle", "cPickle", "pickletools", "dill", "cloudpickle", "marshal", "shelve", "joblib", "jsonpickle",
    "multiprocessing", "xmlrpc", "copyreg", "ray.cloudpickle", "torch.multiprocessing", "torch.package",
}  # fmt: skip
# Functions and methods of other modules that do.
CALLS = {
    "recv_pyobj", "send_pyobj", "recv_serialized", "load_module", "unsafe_load", "full_load",
    "broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list", "send_object_list",
    "recv_object_list", "rpc_sync", "rpc_async",
    "torch.load", "torch.jit.load", "np.load", "numpy.load", "yaml.load", "pandas.read_pickle", "eval", "exec",
}  # fmt: skip
KEYWORDS = {"allow_pickle"}
# What is found has all words of one of these names; a text without them needs no reading.
WORDS = [frozenset(name.split(".")) for name in MODULES | CALLS | KEYWORDS]

# (file, what is found) -> why it is all right. Ray pickles by itself what its actors are given; we give it bytes.
ALLOWED: dict[tuple[str, str], str] = {}


def dotted(node: ast.expr) -> str:
    """`a.b.c` of such an expression; `.c` where it begins with anything else."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            return f"{dotted(value)}.{attr}"
    return ""


def found(source: str) -> Iterator[str]:
    """Names of what a module must not use."""
    there = set(re.findall(r"\w+", source))
    if not any(words <= there for words in WORDS):
        return
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import():
                names = [alias.name for alias in node.names]
            case ast.ImportFrom():
                names = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module or ""]
            case ast.Attribute() | ast.Name():
                whole = dotted(node)
                if whole in CALLS or (isinstance(node, ast.Attribute) and node.attr in CALLS):
                    yield whole
                if any(whole == module or whole.startswith(f"{module}.") for module in MODULES):
                    yield whole
                continue
            case ast.keyword(arg=str(name)) if name in KEYWORDS:
                yield name
                continue
            case ast.Call(func=ast.Name("__import__") | ast.Attribute(attr="import_module"), args=[ast.Constant(name)]):
                names = [str(name)]
            case _:
                continue
        for name in names:
            if any(name == module or name.startswith(f"{module}.") for module in MODULES) or name in CALLS:
                yield name


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "import pickle as p", "from pickle import loads", "import multiprocessing.connection",
        "from multiprocessing import connection", "from torch import load", "import torch\ntorch.load(f)",
        "np.load(f, allow_pickle=True)", "load(f, allow_pickle=flag)", "socket.recv_pyobj()", "import marshal",
        "from ray import cloudpickle", "ray.cloudpickle.loads(x)", "importlib.import_module('pickle')",
        "__import__('shelve')", "def f():\n    import dill", "eval(text)", "dist.broadcast_object_list(x)",
    ],
)  # fmt: skip
def test_the_search_finds(source: str) -> None:
    assert list(found(source))


def test_the_package_has_none() -> None:
    files = sorted(ROOT.rglob("*.py"))
    assert len(files) > 100
    seen = {(str(file.relative_to(ROOT)), name) for file in files for name in found(file.read_text())}
    assert seen == set(ALLOWED), "not allowed, or allowed and no longer there"
