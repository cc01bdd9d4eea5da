"""Single-edit mutants of Python source, by operators on its syntax tree: what
scripts/mutants.py tries.

Each mutant replaces one span of text; the rest of the file stays as it is, comments and line
numbers included. Left alone is what cannot change a computed value: docstrings, annotations,
imports, and what stands inside a `raise` or an `assert`. (Offutt et al. 1996 and Jia & Harman
2011 describe such operators and what a mutation score is worth.)
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMPARISONS: dict[type[ast.cmpop], tuple[str, ...]] = {
    ast.Lt: ("<=", ">="),
    ast.LtE: ("<", ">"),
    ast.Gt: (">=", "<="),
    ast.GtE: (">", "<"),
    ast.Eq: ("!=",),
    ast.NotEq: ("==",),
    ast.Is: ("is not",),
    ast.IsNot: ("is",),
    ast.In: ("not in",),
    ast.NotIn: ("in",),
}
# the sign of an operator, and the one that it becomes
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.BitXor: ("^", "|"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}
_PAIRS = (
    ("min", "max"),
    ("minimum", "maximum"),
    ("amin", "amax"),
    ("argmin", "argmax"),
    ("any", "all"),
    ("zeros", "ones"),
    ("zeros_like", "ones_like"),
    ("new_zeros", "new_ones"),
    ("cumsum", "cumprod"),
    ("rows", "slots"),
)
OPPOSITE = {a: b for pair in _PAIRS for a, b in (pair, pair[::-1])}
# keywords whose value is left alone: a guard of zip, and shapes that only end in an error
LEFT = ("strict", "keepdim", "as_tuple")
# methods that a mutant leaves out
DROPPED = (
    "clamp",
    "clamp_",
    "masked_fill",
    "masked_fill_",
    "flip",
    "clone",
    "contiguous",
    "transpose",
)
# functions of a tensor and a dimension: swapped arguments only end in a TypeError
UNSWAPPED = ("cat", "stack", "gather", "index_select", "repeat_interleave", "full_like", "full")


@dataclass(frozen=True)
class Mutant:
    """One edit. file: relative to the repository; scope: the function it lies in; line: its
    first line, counted from 1;
    operator: what was done; old, new: the whole lines before and after, without indentation;
    start, stop, text: the bytes of the file that it replaces, and by what; statement: first
    and last line of the statement around it (of the statement's head where it has a body)."""

    file: str
    scope: str
    line: int
    operator: str
    old: str
    new: str
    start: int
    stop: int
    text: str
    statement: tuple[int, int] = (0, 0)

    @property
    def key(self) -> str:
        """What it is known by wherever the lines have moved to."""
        return f"{self.file}::{self.scope}: {self.old} -> {self.new}"

    @property
    def identity(self) -> str:
        """Tells mutants of one key apart: two edits may lead to the same text."""
        return f"{self.key} [{self.line}: {self.text}]"

    def apply(self, root: Path) -> bytes:
        """Write it into the file below `root`; returns what stood there."""
        path = root / self.file
        data = path.read_bytes()
        path.write_bytes(data[: self.start] + self.text.encode() + data[self.stop :])
        return data


Edit = tuple[int, int, str, str]  # first byte, byte behind the last, new text, operator


class _Source:
    """A file's bytes with the nodes' places in them."""

    def __init__(self, text: str) -> None:
        self.data = text.encode()
        self.starts = [0]
        for line in self.data.split(b"\n"):
            self.starts.append(self.starts[-1] + len(line) + 1)

    def begin(self, node: Any) -> int:
        return self.starts[node.lineno - 1] + int(node.col_offset)

    def end(self, node: Any) -> int:
        return self.starts[node.end_lineno - 1] + int(node.end_col_offset)

    def text(self, node: ast.AST) -> str:
        return self.data[self.begin(node) : self.end(node)].decode()

    def whole(self, node: ast.AST) -> str:
        """Its text, in brackets where what stands around it could tear it apart."""
        safe = isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript | ast.Constant)
        return self.text(node) if safe else f"({self.text(node)})"

    def between(self, left: ast.AST, right: ast.AST, old: str, new: str, operator: str) -> Edit:
        """The operator sign `old` between two operands replaced."""
        place = self.data.index(old.encode(), self.end(left), self.begin(right))
        return place, place + len(old), new, operator

    def swap(self, node: ast.AST, new: str, operator: str) -> Edit:
        return self.begin(node), self.end(node), new, operator


def mutants(root: Path, file: str, scopes: Sequence[str] = ()) -> list[Mutant]:
    """All mutants of `file` below `root`, in its order. scopes: only in these functions."""
    text = (root / file).read_text()
    source, tree = _Source(text), ast.parse(text)
    found: dict[tuple[int, int, str], Mutant] = {}
    for scope, statement, node in _nodes(tree):
        if scopes and scope not in scopes:
            continue
        for start, stop, new, operator in _edits(source, node):
            mutant = _mutant(source, file, scope, (start, stop, new, operator), statement)
            found.setdefault((start, stop, new), mutant)
    return list(found.values())


def choose(pool: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """`count` of a file's mutants, the operators in turn and each from a seeded shuffle: so
    that the many mutated constants do not crowd out the rest. The same choice for the same
    source."""
    chance = random.Random(f"{seed} {pool[0].file}" if pool else seed)
    by_operator: dict[str, list[Mutant]] = {}
    for mutant in pool:
        by_operator.setdefault(mutant.operator, []).append(mutant)
    for group in by_operator.values():
        chance.shuffle(group)
    chosen: list[Mutant] = []
    lines: set[tuple[int, str]] = set()
    while len(chosen) < count and any(by_operator.values()):
        for group in by_operator.values():
            while group:
                mutant = group.pop()
                if (mutant.line, mutant.operator) not in lines:
                    lines.add((mutant.line, mutant.operator))
                    chosen.append(mutant)
                    break
    return sorted(chosen[:count], key=lambda m: (m.line, m.start, m.text))


def _mutant(
    source: _Source, file: str, scope: str, edit: Edit, statement: tuple[int, int]
) -> Mutant:
    start, stop, text, operator = edit
    data = source.data
    first = data.rfind(b"\n", 0, start) + 1
    last = data.find(b"\n", stop)
    after = data[:start] + text.encode() + data[stop:]
    old = data[first:last].decode()
    new = after[first : last + len(text.encode()) - (stop - start)].decode()
    old, new = (" ".join(lines.split()) for lines in (old, new))
    line = data.count(b"\n", 0, start) + 1
    return Mutant(file, scope, line, operator, old, new, start, stop, text, statement)


def _nodes(tree: ast.Module) -> Iterator[tuple[str, tuple[int, int], ast.AST]]:
    """Every node that may be edited, with its function and the lines of its statement."""
    todo: list[tuple[str, tuple[int, int], ast.AST]] = [("", (0, 0), tree)]
    while todo:
        scope, lines, node = todo.pop()
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Raise | ast.Assert):
            continue
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            lines = node.lineno, body[0].lineno - 1 if body else node.end_lineno or node.lineno
            lines = lines[0], max(lines)
        inner = scope
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            inner = f"{scope}.{node.name}" if scope else node.name
        elif scope:
            yield scope, lines, node
        todo += [(inner, lines, part) for part in reversed(_parts(node))]


def _parts(node: ast.AST) -> list[ast.AST]:
    """The parts of a node that may hold edits."""
    if isinstance(node, ast.FunctionDef):
        return [*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body]
    if isinstance(node, ast.ClassDef | ast.Module):
        # fields, their annotations and constants are no code
        return [part for part in node.body if isinstance(part, ast.FunctionDef | ast.ClassDef)]
    if isinstance(node, ast.AnnAssign):
        return [node.value] if node.value else []
    if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.keyword) and node.arg in LEFT):
        return []
    return list(ast.iter_child_nodes(node))


def _edits(source: _Source, node: ast.AST) -> Iterator[Edit]:
    """The edits of one node, those of its parts not among them."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        right = node.comparators[0]
        old = source.data[source.end(node.left) : source.begin(right)].decode().strip()
        for new in COMPARISONS.get(type(node.ops[0]), ()):
            if "(" not in old and ")" not in old:
                yield source.between(node.left, right, old, new, "comparison")
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        old, new = ARITHMETIC[type(node.op)]
        yield source.between(node.left, node.right, old, new, "arithmetic")
    elif isinstance(node, ast.AugAssign) and type(node.op) in ARITHMETIC:
        old, new = (sign + "=" for sign in ARITHMETIC[type(node.op)])
        yield source.between(node.target, node.value, old, new, "arithmetic")
    elif isinstance(node, ast.BoolOp):
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        yield source.between(node.values[0], node.values[1], old, new, "and or")
    elif isinstance(node, ast.UnaryOp) and not _is_last_dim(node):
        yield source.swap(node, source.whole(node.operand), "negation")
    elif isinstance(node, ast.Constant):
        yield from _constant(source, node)
    elif isinstance(node, ast.IfExp) and not _compared(node.test):
        first, second = source.text(node.body), source.text(node.orelse)
        yield source.swap(node, f"{second} if {source.text(node.test)} else {first}", "condition")
    elif isinstance(node, ast.If) and not (_compared(node.test) or _guards(node)):
        yield source.swap(node.test, f"not ({source.text(node.test)})", "condition")
    elif isinstance(node, ast.Slice):
        if node.upper is not None:
            yield source.swap(node.upper, f"{source.whole(node.upper)} + 1", "slice")
            yield source.swap(node.upper, f"{source.whole(node.upper)} - 1", "slice")
        if node.lower is not None:
            yield source.swap(node.lower, f"{source.whole(node.lower)} + 1", "slice")
    elif isinstance(node, ast.Call):
        yield from _call(source, node)
    if isinstance(node, ast.Expr | ast.Assign | ast.AugAssign | ast.Break | ast.Continue):
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        # a name that is never bound only ends in a NameError
        binds = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name | ast.Tuple)
        if not binds and not docstring:
            yield source.swap(node, "pass", "statement")


def _compared(test: ast.AST) -> bool:
    """Whether mutated comparisons turn this condition round already."""
    return isinstance(test, ast.Compare) and len(test.ops) == 1


def _guards(node: ast.If) -> bool:
    """Whether all that depends on the condition is an error."""
    return all(isinstance(part, ast.Raise) for part in node.body)


def _constant(source: _Source, node: ast.Constant) -> Iterator[Edit]:
    if isinstance(node.value, bool):
        yield source.swap(node, str(not node.value), "true false")
    elif isinstance(node.value, int):
        values = {0: (1,), 1: (0, 2)}.get(node.value, (node.value + 1, node.value - 1))
        for value in values:
            yield source.swap(node, str(value), "constant")
    elif isinstance(node.value, float) and node.value not in (2.0, float("inf")):
        yield source.swap(node, str(1.0 if node.value == 0 else node.value / 2), "constant")


def _call(source: _Source, node: ast.Call) -> Iterator[Edit]:
    name = node.func
    if isinstance(name, ast.Name | ast.Attribute):
        word = name.id if isinstance(name, ast.Name) else name.attr
        if word in OPPOSITE:
            end = source.end(name)
            yield end - len(word), end, OPPOSITE[word], "opposite"
        if isinstance(name, ast.Attribute) and word in DROPPED:
            yield source.swap(node, source.whole(name.value), "call left out")
    for keyword in node.keywords:
        if keyword.arg in ("min", "max"):
            start = source.begin(keyword)
            yield start, start + 3, OPPOSITE[keyword.arg], "opposite"
    plain = [a for a in node.args if not isinstance(a, ast.Starred | ast.GeneratorExp)]
    if len(plain) == len(node.args) >= 2:
        a, b = plain[-2:]
        word = getattr(name, "attr", "")
        if source.text(a) != source.text(b) and word not in UNSWAPPED:
            middle = source.data[source.end(a) : source.begin(b)].decode()
            new = source.text(b) + middle + source.text(a)
            yield source.begin(a), source.end(b), new, "arguments"
    if isinstance(name, ast.Attribute):
        for dim in filter(_is_last_dim, node.args):
            yield source.swap(dim, "0", "dimension")


def _is_last_dim(node: ast.AST) -> bool:
    """A literal -1, most often the dimension that a reduction or a join runs over."""
    return isinstance(node, ast.expr) and ast.unparse(node) == "-1"
