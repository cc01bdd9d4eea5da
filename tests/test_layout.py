"""The rules that hold the house together: imports point one way, no pickle, no network at
import, one licence.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

from outrider.scripts.common.files import ROOT

MAY_IMPORT = {
    "conf": {"conf"},
    "decode": {"conf", "decode"},
    "heads": {"conf", "decode", "heads"},
    "train": {"conf", "decode", "heads", "train"},
    "scripts": {"conf", "decode", "heads", "train", "scripts"},
}
SOURCES = [p for package in MAY_IMPORT for p in sorted((ROOT / package).rglob("*.py"))]


@functools.cache
def text_of(path: Path) -> str:
    return path.read_text()


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Every node of a file's syntax tree; the file itself comes first."""
    return list(ast.walk(ast.parse(text_of(path))))


def test_source_files() -> None:
    for path in SOURCES:
        package = path.relative_to(ROOT).parts[0]
        text, nodes = text_of(path), nodes_of(path)
        tree = nodes[0]
        assert isinstance(tree, ast.Module)
        assert ast.get_docstring(tree) or not tree.body, f"{path}: say what the file is for"
        named = {n.name for node in nodes if isinstance(node, ast.Import) for n in node.names}
        named |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        short = {name for name in named if name.partition(".")[0] in MAY_IMPORT}
        assert not short, f"{path} imports {short} by a short name; write outrider.NAME"
        named = {name.removeprefix("outrider.") for name in named}
        ours = {name.partition(".")[0] for name in named} & set(MAY_IMPORT)
        assert ours <= MAY_IMPORT[package], f"{path} imports {ours - MAY_IMPORT[package]}"
        assert "pickle" not in named, f"{path} imports pickle"
        assert not (package == "conf" and "torch" in named), f"{path} imports torch"
        for word in ("weights_only=False", "TODO", "FIXME", "NotImplementedError"):
            assert word not in text, f"{path}: {word}"
        unpickled = [line for line in text.split("\n") if "torch.load(" in line]
        assert all("weights_only=True" in line for line in unpickled), f"{path}: {unpickled}"


def imports() -> dict[str, set[str]]:
    """Every file of ours and the files that it imports, for typing alone and inside functions
    too."""
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in SOURCES
    }
    found: dict[str, set[str]] = {}
    for name, path in files.items():
        wanted: set[str] = set()
        for node in nodes_of(path):
            if isinstance(node, ast.Import):
                wanted |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    own = inner.removeprefix("outrider.") in files
                    wanted.add(inner if own else node.module)
        found[name] = {one.removeprefix("outrider.") for one in wanted} & files.keys()
    return found


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += graph[name]
    return seen


def test_no_files_import_each_other() -> None:
    graph = imports()
    below = {name: reachable(graph, name) for name in graph}
    circles = {
        frozenset(other for other in below[name] if name in below[other])
        for name in graph
        if name in below[name]
    }
    assert not circles, f"files that import each other: {[sorted(c) for c in circles]}"


# The rooms of scripts/: each imports from those of lower levels alone, the commands from all.
LEVELS = {
    "common": 0,
    **dict.fromkeys(("data", "machine"), 1),
    "scoring": 2,
    **dict.fromkeys(("certificate", "exporting", "reports", "serve_http", "tuning"), 3),
}


def test_rooms_of_scripts_import_one_way() -> None:
    def room(name: str) -> str:
        parts = name.split(".")
        return parts[1] if len(parts) > 2 or (ROOT / "scripts" / parts[-1]).is_dir() else "commands"

    levels = {**LEVELS, "commands": 9}
    pairs = {
        (room(name), room(other)): f"{name} imports {other}"
        for name, others in imports().items()
        for other in others
        if name.startswith("scripts.") and other.startswith("scripts.")
    }
    rooms = {one for pair in pairs for one in pair}
    assert rooms <= levels.keys(), f"give {rooms - levels.keys()} a level"
    upwards = [said for (a, b), said in pairs.items() if a != b and levels[b] >= levels[a]]
    assert not upwards


PARAMETERS = 8  # of a function, at most
LINES = 60  # of a function, at most

# What a stranger reads to know how a token comes about: the algorithm, what heads share, the
# training loop, and one head with what it shares with its kin. Other drafters than that one do
# not count (n-grams, a separate model, EAGLE-1), nor what the model is asked once
# (decode/probe.py), what comes before the first step (train/setup.py), what is refused
# (decode/checks.py), the keys that heads share (heads/config.py), how a head is written and read
# (heads/saved.py), and what is the same function at less cost (heads/layers/attention.py). Lines
# may only become fewer.
ALGORITHM = (
    *("verify", "residual", "siblings", "engine", "tree", "layout", "grow", "sampling"),
    *("rng", "generation", "scorer", "target", "cache", "masks", "attention", "drafters"),
)
SHARED = (
    *(f"decode/{name}.py" for name in ALGORITHM),
    *("heads/base.py", "heads/batch.py", "heads/losses.py"),
    *("train/loop.py", "train/run.py"),
)
EAGLE = (
    *(f"heads/layers/{name}.py" for name in ("head", "drafter", "layer", "plan", "shape")),
    *(f"heads/eagle/{name}.py" for name in ("config", "head", "net")),
)
READING = {
    "Medusa": (
        4590,
        (*(f"heads/medusa/{name}.py" for name in ("config", "base", "head")),),
    ),
    "EAGLE": (
        5360,
        EAGLE,
    ),
}


@functools.cache
def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return [node for node in nodes_of(path) if isinstance(node, kinds)]


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    """Those that have a name, without self, cls and the ctx of an autograd function."""
    given = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
    return given[1:] if given and given[0].arg in ("self", "cls", "ctx") else given


def test_no_function_has_more_than_eight_parameters() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{function.name}"
        for path in SOURCES
        for function in functions(path)
        if len(parameters(function)) > PARAMETERS
    ]
    assert not long


def test_no_function_has_more_than_sixty_lines() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{function.name}"
        for path in SOURCES
        for function in functions(path)
        if (function.end_lineno or 0) - function.lineno >= LINES
    ]
    assert not long


@pytest.mark.parametrize("head", READING)
def test_the_reading_path_becomes_no_longer(head: str) -> None:
    most, own = READING[head]
    lines = {name: (ROOT / name).read_text().count("\n") for name in (*SHARED, *own)}
    total = sum(lines.values())
    listed = "\n".join(f"{count:5} {name}" for name, count in lines.items())
    assert total <= most, f"{total} lines with {head}, {most} allowed:\n{listed}"


def test_targets_heads_and_drafters_are_typed() -> None:
    """No `Any` for what the project is about."""
    loose = [
        f"{path.relative_to(ROOT)}:{function.lineno} {one.arg}"
        for path in SOURCES
        for function in functions(path)
        for one in parameters(function)
        if one.arg in ("target", "head", "drafter", "draft")
        and (one.annotation is None or ast.unparse(one.annotation) == "Any")
    ]
    assert not loose


def test_the_formatter_decides_the_layout() -> None:
    skipped = [str(path) for path in SOURCES if "fmt: " + "skip" in text_of(path)]
    assert not skipped
    lines = [line for path in SOURCES for line in text_of(path).split("\n")]
    wide = sum(len(line) > 95 for line in lines)
    assert wide < 0.03 * len(lines), f"{wide} of {len(lines)} lines are wider than 95 columns"


def code_of(path: str) -> str:
    """A file in lower case without its docstrings and comments."""
    tree = ast.parse((ROOT / path).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ""
    return ast.unparse(tree).lower()


def test_the_loop_knows_no_head_and_the_engine_no_drafter() -> None:
    loop, engine = code_of("train/loop.py"), code_of("decode/engine.py")
    assert not [w for w in ("medusa", "eagle", "hydra") if w in loop]
    assert not [w for w in ("medusa", "eagle", "ngram") if w in engine]
