"""A configuration is made once and never changed."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("conf", "decode", "heads", "train", "scripts")
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
