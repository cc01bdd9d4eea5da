"""A configuration is made once and never changed: by type, and by the text of every file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("conf", "decode", "heads", "train", "scripts")
CHANGING = {"append", "extend", "insert", "remove", "pop", "clear", "sort", "update", "setdefault"}
TREES = {p: ast.parse(p.read_text()) for room in ROOMS for p in (ROOT / room).rglob("*.py")}


def names_in(node: ast.AST | None) -> set[str]:
    """The classes that an annotation, a base or an argument names."""
    found = set()
    for part in ast.walk(node) if node is not None else ():
        if isinstance(part, ast.Name | ast.Attribute):
            found.add(part.id if isinstance(part, ast.Name) else part.attr)
    return found


def is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in names_in(mark) for mark in node.decorator_list)


def is_frozen(node: ast.ClassDef) -> bool:
    return any("frozen=True" in ast.unparse(mark) for mark in node.decorator_list)


def configurations() -> dict[str, list[tuple[Path, ast.ClassDef]]]:
    """The schema of every command, what it inherits from and what its groups are, by name."""
    classes: dict[str, list[tuple[Path, ast.ClassDef]]] = {}
    wanted = {"HeadConfig"}
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and is_dataclass(node):
                classes.setdefault(node.name, []).append((path, node))
            if isinstance(node, ast.Call) and names_in(node.func) == {"entry"}:
                wanted |= names_in(node.args[1])
    found: dict[str, list[tuple[Path, ast.ClassDef]]] = {}
    while wanted:
        name = wanted.pop()
        if name in found or name not in classes:
            continue
        found[name] = classes[name]
        for _, node in classes[name]:
            parts = [
                *node.bases,
                *(x.annotation for x in node.body if isinstance(x, ast.AnnAssign)),
            ]
            wanted.update(*map(names_in, parts))
        for other, defined in classes.items():  # the keys of a kind of head
            if any(name in names_in(base) for _, node in defined for base in node.bases):
                wanted.add(other)
    return found


CONFIGS = configurations()


def test_every_configuration_is_frozen() -> None:
    assert {"TrainConfig", "OptimConfig", "EagleConfig", "EvaluateConfig"} <= set(CONFIGS)
    loose = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for known in CONFIGS.values()
        for path, node in known
        if not is_frozen(node)
    ]
    assert not loose, loose


def holders(function: ast.AST) -> set[str]:
    """Names that hold a configuration in a function: `cfg`, and what is annotated as one."""
    found = {"cfg"}
    for node in ast.walk(function):
        if isinstance(node, ast.arg) and names_in(node.annotation) & set(CONFIGS):
            found.add(node.arg)
        here = isinstance(node, ast.AnnAssign) and names_in(node.annotation) & set(CONFIGS)
        if here and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def is_part(node: ast.AST, known: set[str]) -> bool:
    """Whether an expression is a configuration, or lies in one: cfg, self.cfg, run.cfg.optim."""
    if isinstance(node, ast.Name):
        return node.id in known
    if isinstance(node, ast.Attribute):
        return node.attr == "cfg" or is_part(node.value, known)
    return isinstance(node, ast.Subscript) and is_part(node.value, known)


def changes(tree: ast.AST) -> Iterator[str]:
    """Every statement that changes a configuration."""
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    for function in functions:
        known = holders(function)
        for node in ast.walk(function):
            inside = isinstance(node, ast.Attribute | ast.Subscript)
            if inside and not isinstance(node.ctx, ast.Load) and is_part(node.value, known):
                yield f"{node.lineno}: {ast.unparse(node)}"
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            if called in ("setattr", "delattr", "vars") and is_part(node.args[0], known):
                yield f"{node.lineno}: {ast.unparse(node)}"
            if called.endswith(("object.__setattr__", "object.__delattr__")):
                yield f"{node.lineno}: {ast.unparse(node)}"
            of = node.func.value if isinstance(node.func, ast.Attribute) else None
            if of is not None and node.func.attr in CHANGING and is_part(of, known):  # type: ignore[attr-defined]
                yield f"{node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize(
    "line",
    [
        "cfg.steps = 1",
        "run.cfg.optim.lr *= 2",
        "keys.lr, x = 1, 2",
        "cfg.data.skip[0] = 3",
        "del cfg.steps",
        "setattr(keys, 'lr', 1)",
        "object.__setattr__(anything, 'lr', 1)",
        "cfg.data.skip.append(3)",
    ],
)
def test_a_change_is_found(line: str) -> None:
    assert list(changes(ast.parse(f"def f(cfg, keys: OptimConfig, run):\n    {line}")))


def test_a_new_one_is_no_change() -> None:
    assert not list(changes(ast.parse("def f(self, cfg):\n    self.cfg = replace(cfg, steps=1)")))


def test_no_line_changes_a_configuration() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path, tree in TREES.items()
        for line in changes(tree)
        if path != ROOT / "decode" / "sampling.py"  # a Sampling, while it is made
    ]
    assert not found, "\n".join(found)
