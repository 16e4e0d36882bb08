"""Nothing from the network can become code: the modules that read it have no way to run, load, import or look up by name."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "fusion_p2p"
FLOORS = ("graph", "wire", "net", "compress", "execute", "peer", "swarm", "job", "plan", "relay")
CALLS = {"eval", "exec", "compile", "__import__", "globals", "locals", "vars", "breakpoint", "input"}
LOOKUPS = {"getattr", "setattr", "delattr", "hasattr"}
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "importlib", "runpy", "code", "pydoc"}
ATTRIBUTES = {("torch", "load"), ("torch", "save"), ("numpy", "load"), ("np", "load"), ("yaml", "load"), ("joblib", "load")}
LOADERS = {"loads_pickle", "load_state_dict_from_url", "attrgetter", "methodcaller"}

SOURCES = sorted(path for floor in FLOORS for path in (PACKAGE / floor).rglob("*.py"))
ALLOWED = {"net/hivemind_parts.py": ["imports importlib.util"]}
"""It puts one package in its place, by a literal name."""


def _is_loader(module: str) -> bool:
    return module.split(".")[0] in MODULES and module != "importlib.resources"  # which only finds files of a package


def offences(tree: ast.AST) -> list[str]:
    """Descriptions of what could turn data into code."""
    found: list[str] = []
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found += [f"imports {item.name}" for item in names if _is_loader(item.name)]
            case ast.ImportFrom(module=str(module)) if _is_loader(module):
                found.append(f"imports from {module}")
            case ast.ImportFrom(names=names):
                found += [f"imports {item.name}" for item in names if item.name in LOADERS]
            case ast.Call(func=ast.Name(id=name)) if name in CALLS:
                found.append(f"calls {name}")
            case ast.Call(func=ast.Name(id=name), args=[_, ast.Constant(), *_]) if name in LOOKUPS:
                pass  # a literal name is as good as an attribute
            case ast.Call(func=ast.Name(id=name)) if name in LOOKUPS:
                found.append(f"calls {name} with a computed name")
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if (owner, name) in ATTRIBUTES:
                found.append(f"uses {owner}.{name}")
            case ast.Attribute(attr=name) if name in LOADERS or name in ("__dict__", "__getattribute__", "__subclasses__"):
                found.append(f"uses {name}")
            case ast.keyword(arg="weights_only") | ast.keyword(arg="allow_pickle"):
                found.append(f"passes {node.arg}")
    return found


@pytest.mark.row(34)
@pytest.mark.parametrize("path", SOURCES, ids=[str(path.relative_to(PACKAGE)) for path in SOURCES])
def test_no_way_from_data_to_code(path: Path) -> None:
    allowed = ALLOWED.get(str(path.relative_to(PACKAGE)), [])
    assert offences(ast.parse(path.read_text())) == allowed


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from importlib import import_module",
        "import torch\ntorch.load(path)",
        "eval(text)",
        "exec(text)",
        "__import__(name)",
        "getattr(torch, name)",
        "getattr(torch.ops.aten, node.op)",
        "setattr(thing, name, value)",
        "from operator import attrgetter",
        "thing.__dict__[name]",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_the_search_finds_what_it_is_for(source: str) -> None:
    assert offences(ast.parse(source)) != []


def test_a_literal_name_is_no_offence() -> None:
    assert offences(ast.parse("getattr(thing, 'closed', False)")) == []
