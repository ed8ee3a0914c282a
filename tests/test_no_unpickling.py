"""Where the source unpickles, and why nobody else can write there."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator

import pytest
from support.modules import modules

ALLOWED = {
    "node/child.py": {
        "pickle.load": "a descriptor from the process for which this one was started: inherited, "
        "or over a connection whose other end is this user's, as the kernel said when it was made"
    },
    "source/remote/helper.py": {
        "pickle.loads": "a socketpair of the helper with the process that started it",
        "Connection.recv_bytes": "bytes; what becomes of them is the line above",
    },
    "source/remote/obstore_backend.py": {"pickle.loads": "options that this job was given"},
    "source/remote/fsspec_backend.py": {"pickle.loads": "options that this job was given"},
    "epoch/codec.py": {
        "pickle.loads": "for a key that no other job has, so that it lies in anonymous memory only"
    },
    "pytorch/wrapped.py": {"Connection.recv": "a pipe of a fork of this process"},
    "pytorch/hand_over.py": {"pickle.loads": "anonymous memory that a worker inherited"},
    "testing/policy_conformance.py": {"pickle.loads": "what it pickled in the same line"},
    "testing/sampler_conformance.py": {"pickle.loads": "what it pickled in the same line"},
}

MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
NAMES = {"load", "loads", "Unpickler", "open", "Shelf", "DbfilenameShelf"}
RECEIVE = {"recv", "recv_bytes"}  # of multiprocessing: the first unpickles


def unpickling(nodes: Collection[ast.AST]) -> Iterator[str]:
    """Yield what a module uses that unpickles, or may."""
    modules: dict[str, str] = {}
    uses_connections = False
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                modules[alias.asname or alias.name] = alias.name
                uses_connections |= alias.name.startswith("multiprocessing")
        elif isinstance(node, ast.ImportFrom):
            uses_connections |= (node.module or "").startswith("multiprocessing")
            for alias in node.names:
                if node.module in MODULES and alias.name in NAMES | {"*"}:
                    yield f"{node.module}.{alias.name}"
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in nodes:
        if isinstance(node, ast.Attribute):
            of = modules.get(ast.unparse(node.value), "")
            if of in MODULES and node.attr in NAMES:
                yield f"{of}.{node.attr}"
            elif uses_connections and node.attr in RECEIVE:
                yield f"Connection.{node.attr}"
        if isinstance(node, ast.Call):
            yield from loading(node, modules)


def loading(call: ast.Call, modules: dict[str, str]) -> Iterator[str]:
    name = ast.unparse(call.func)
    options = {word.arg: ast.unparse(word.value) for word in call.keywords}
    base, _, rest = name.partition(".")
    full = ".".join(filter(None, (modules.get(base, base), rest)))
    if full == "torch.load" and options.get("weights_only") != "True":
        yield "torch.load without weights_only=True"
    if full == "numpy.load" and options.get("allow_pickle", "False") != "False":
        yield "numpy.load with allow_pickle"
    if full == "pandas.read_pickle":
        yield full


def found_in(code: str) -> set[str]:
    return set(unpickling([*ast.walk(ast.parse(code))]))


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import pickle\npickle.loads(b'')", "pickle.loads"),
        ("import pickle as p\np.Unpickler(f).load()", "pickle.Unpickler"),
        ("from pickle import loads as q\nq(b'')", "pickle.loads"),
        ("from pickle import Unpickler\nclass U(Unpickler): ...", "pickle.Unpickler"),
        ("import marshal\nmarshal.load(f)", "marshal.load"),
        ("import shelve\nshelve.open('x')", "shelve.open"),
        ("import cloudpickle\ncloudpickle.loads(x)", "cloudpickle.loads"),
        ("import torch\ntorch.load(f)", "torch.load without weights_only=True"),
        ("import torch\ntorch.load(f, weights_only=w)", "torch.load without weights_only=True"),
        ("import numpy as np\nnp.load(f, allow_pickle=True)", "numpy.load with allow_pickle"),
        ("from multiprocessing.connection import Client\nc.recv()", "Connection.recv"),
    ],
)
def test_the_test_sees(code: str, found: str) -> None:
    assert found in found_in(code)


@pytest.mark.parametrize(
    "code",
    [
        "import pickle\npickle.dumps(1)",
        "import json\njson.loads('1')",
        "import torch\ntorch.load(f, weights_only=True)",
        "import numpy as np\nnp.load(f, allow_pickle=False)\nnp.load(f)",
        "import socket\ns.recv(1)",
    ],
)
def test_the_test_lets_pass(code: str) -> None:
    assert not found_in(code)


def test_c3_nothing_is_unpickled_that_others_could_write() -> None:
    found = {module.name: names for module in modules() if (names := set(unpickling(module.nodes)))}
    assert found == {name: uses.keys() for name, uses in ALLOWED.items()}
