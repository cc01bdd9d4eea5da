"""Mutation score of the layers that guard losslessness: one wrong edit at a time, who notices?

    # all modules; half an hour to an hour on one core
    python scripts/mutants.py
    python scripts/mutants.py 'modules=[decode/rng.py]' mutants=20 out=/tmp/rng.json

Every mutant is one edit of one file (scripts/proofs/mutants/mutate.py), made in a copy of the
code and tried on three layers:

enumeration   the exact law of one verification on random and extreme worlds, and of the whole
              loop, every branch
tests         the fast unit tests about the module
certificate   the layers of scripts/certify.py, 20,000 tokens on a tiny target, under several
              drafters and settings

A mutant that no certificate rejects either changes the law, and is a gap, or does not: then
HARMLESS says why, found by the mutant's text wherever its line has moved to. Written: OUT with
all mutants, of which `make readme` makes the table of docs/mutants.md. Goes on where it was
stopped: what a layer found waits in STATE for as long as the code that it depends on stays the
same. Exit code 1: a mutant got through.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

if __name__ == "__main__":  # else scripts/ comes first and shadows libraries
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from conf.errors import CheckFailed, UserError, resumable
from conf.rules import OneOrMore, Seed, one_of
from conf.schema import entry
from scripts.common import files
from scripts.common.parts import Parts
from scripts.common.progress import Steps, columns
from scripts.proofs.mutants import page as mutants_page
from scripts.proofs.mutants.mutate import Mutant, choose, mutants

# The functions that are mutated, by module; none named: all. Of the drafters those that make
# the law q.
MODULES: dict[str, tuple[str, ...]] = {
    "decode/verify.py": (),
    "decode/unasked.py": (),
    "decode/inner.py": (),
    "decode/sampling.py": (),
    "decode/rng.py": (),
    "decode/inverse_cdf.py": (),
    "decode/engine.py": (),
    "decode/cache.py": (),
    "decode/masks.py": (),
    "decode/grow.py": (),
    "decode/levels.py": (),
    "decode/price.py": (),
    "decode/adaptive.py": (),
    "decode/union.py": (),
    "decode/draft_model.py": (
        "DraftModel.propose",
        "DraftModel.level",
        "DraftModel.logits",
        "DraftModel._extend",
    ),
    "heads/drafting.py": ("Drafting.propose",),
    "heads/parallel/drafter.py": ("AtOnce.open",),
    "heads/parallel/medusa.py": (
        "MedusaDrafter.logits",
        "MarkovDrafter.open",
        "MarkovDrafter.level",
        "MarkovDrafter._after",
    ),
    "heads/eagle/drafter.py": (
        "EagleDrafter.open",
        "EagleDrafter.level",
        "EagleDrafter._extend",
    ),
}
# Functions to be read or that only word an error: no decoding passes through them.
ASIDE = ("verify_chain", "_inverse", "Law.check")
COPIED = ("conf", "decode", "heads", "scripts", "tests", "train")
LAYERS = ("enumeration", "tests", "certificate")
SETTINGS = 6  # of certificates: those of worlds.CERTIFIED
TRACED = 2000  # tokens of a certificate that shows which lines it executes
OURS = ("decode/**/*.py", "heads/**/*.py", "scripts/proofs/mutants/*.py")
DEPENDS = {
    "enumeration": (*OURS, "scripts/proofs/e*.py"),
    "tests": (*OURS, "tests/**/*.py"),
    "certificate": (*OURS, "scripts/proofs/*.py"),
}
SECONDS = {"enumeration": 30, "tests": 120, "certificate": 90}  # of CPU, per trial


@dataclass
class MutantsConfig:
    """Keys of scripts/mutants.py."""

    # files to mutate; [] = all that guard the law
    modules: list[Annotated[str, one_of(MODULES)]] = field(default_factory=list)
    # how many mutants, spread evenly over the modules
    mutants: OneOrMore = 165
    # emitted tokens of a certificate's sampling layer
    tokens: OneOrMore = 20000
    # layers to try
    layers: list[Annotated[str, one_of(LAYERS)]] = field(default_factory=lambda: list(LAYERS))
    # JSON file of the results
    out: str = "docs/results/mutants.json"
    # JSON file that says of each mutant that does not change the law why it does not
    harmless: str = "docs/results/mutants-harmless.json"
    # folder for the results of an unfinished run
    state: str = "runs/mutants"
    # seed of the choice
    seed: Seed = 0
    # only those that the run in OUT let through or that no certificate of it rejected, on the
    # code of today; what rejects them now stands beside what was found then
    again: bool = False
    # no progress bar
    quiet: bool = False


def chosen(cfg: MutantsConfig) -> list[Mutant]:
    """The mutants to try: as many of each module as of the others, where it has them."""
    names = cfg.modules or list(MODULES)
    pools = {
        name: [m for m in mutants(files.ROOT, name, MODULES[name]) if m.scope not in ASIDE]
        for name in names
    }
    left, found = cfg.mutants, []
    for rank, name in enumerate(sorted(names, key=lambda n: len(pools[n]))):
        share = left // (len(names) - rank)
        some = choose(pools[name], share, cfg.seed)
        found += some
        left -= len(some)
    order = {name: i for i, name in enumerate(names)}
    return sorted(found, key=lambda m: (order[m.file], m.line, m.start, m.text))


class Nursery:
    """A copy of the code and a process that tries it (nursery.py)."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in COPIED:
            shutil.copytree(
                files.ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        for path in files.ROOT.glob("*.toml"):
            shutil.copy(path, root)
        for path in root.rglob(
            "*.py"
        ):  # in the past, so that an edited file is never taken for the compiled one
            os.utime(path, (10**9, 10**9))
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
        line = [sys.executable, "-m", "scripts.proofs.mutants.nursery"]
        self.process = subprocess.Popen(
            line, cwd=root, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """The result of one trial of the code as it now stands in the copy."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError("the process that tries mutants has ended")
        found: dict[str, Any] = json.loads(answer)
        return found

    @contextmanager
    def edited(self, mutant: Mutant) -> Iterator[None]:
        """The copy with this mutant in it."""
        before = mutant.apply(self.root)
        try:
            yield
        finally:
            path = self.root / mutant.file
            path.write_bytes(before)
            os.utime(path, (10**9, 10**9))

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


@contextmanager
def nursery() -> Iterator[Nursery]:
    """One in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        found = Nursery(Path(folder))
        try:
            yield found
        finally:
            found.close()


def baseline(home: Nursery, cfg: MutantsConfig, layer: str, names: Sequence[str]) -> list[Any]:
    """The correct code through a layer, which it must pass. For certificates: by setting, the
    lines that it executes and what its reference found. Raises UserError when the layer fails."""

    def passed(job: dict[str, Any]) -> dict[str, Any]:
        found = home.ask({"layer": layer, "seconds": 300, "tokens": cfg.tokens, "known": {}, **job})
        if found["caught"]:
            raise UserError(
                f"layers: {layer} rejects the code as it stands ({found['why']}); mend that first"
            )
        return found

    if layer == "tests":
        return [passed({"file": name})["seconds"] for name in names]
    if layer == "enumeration":
        return [passed({})["seconds"]]
    settings = []
    for number in range(SETTINGS):
        traced = passed({"settings": [number], "tokens": TRACED, "trace": True})
        whole = passed({"settings": [number]})
        settings.append(
            {"lines": traced["lines"], "known": whole["known"], "seconds": whole["seconds"]}
        )
    return settings


def attempt(
    home: Nursery, cfg: MutantsConfig, mutant: Mutant, layer: str, base: list[Any]
) -> dict[str, Any]:
    """One mutant through a layer: {"found": what rejected it, None where nothing did}.
    Certificates that do not execute the edited statement are left out: they cannot see it."""
    job = {"layer": layer, "file": mutant.file, "seconds": SECONDS[layer], "tokens": cfg.tokens}
    row: dict[str, Any] = {"id": mutant.identity, "found": None}
    if layer == "certificate":
        first, last = mutant.statement
        lines = [setting["lines"].get(mutant.file, []) for setting in base]
        reached = [i for i, seen in enumerate(lines) if any(first <= n <= last for n in seen)]
        row["settings"] = reached
        if not reached:
            return row
        job |= {
            "settings": reached,
            "known": {k: v for i in reached for k, v in base[i]["known"].items()},
        }
    with home.edited(mutant):
        found = home.ask(job)
    row["seconds"] = found["seconds"]
    if found["caught"]:
        row["found"] = {"layer": found["layer"], "why": found["why"]}
    return row


def former(path: Path) -> dict[str, Any]:
    """The results of an earlier run. Raises UserError where there are none."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        raise UserError(f"again: {path} holds no run; start one without again=true") from None
    return found


def let_through(rows: Sequence[dict[str, Any]]) -> list[Mutant]:
    """Those mutants of a run that nothing rejected, or whose change of the law no certificate
    did, as far as the code that they change still stands."""
    keys = {row["key"] for row in rows if mutants_page.let_through(row)}
    files_of = {row["file"] for row in rows if row["key"] in keys}
    pools = (mutants(files.ROOT, name, MODULES[name]) for name in MODULES if name in files_of)
    return [mutant for pool in pools for mutant in pool if mutant.key in keys]


def run(cfg: MutantsConfig, work: Sequence[Mutant]) -> list[dict[str, Any]]:
    """These mutants with what every layer found."""
    hidden = ("start", "stop", "statement")
    rows = {
        m.identity: {k: v for k, v in asdict(m).items() if k not in hidden} | {"key": m.key}
        for m in work
    }
    with nursery() as home, Steps(*columns(44), quiet=cfg.quiet) as bar:
        for layer in cfg.layers:
            task = bar.add_task(layer, total=len(work))
            known = _tried(home, cfg, layer, work, functools.partial(bar.advance, task))
            for name, row in rows.items():
                row[layer] = known[name]["found"]
                row |= {k: v for k, v in known[name].items() if k == "settings"}
    return list(rows.values())


def _tried(
    home: Nursery,
    cfg: MutantsConfig,
    layer: str,
    work: Sequence[Mutant],
    advance: Callable[[], None],
) -> dict[str, dict[str, Any]]:
    """By mutant, what a layer found; those of an earlier run are not tried again."""
    parts = Parts(Path(cfg.state) / layer, [_code(layer), cfg.tokens])
    known = {row["id"]: row for row in parts.lines("rows")}
    base: list[Any] = []
    if any(m.identity not in known for m in work):
        names = sorted({m.file for m in work})
        base = parts.once(f"baseline-{len(names)}", lambda: baseline(home, cfg, layer, names))
    for mutant in work:
        if mutant.identity not in known:
            known[mutant.identity] = attempt(home, cfg, mutant, layer, base)
            parts.add("rows", known[mutant.identity])
        advance()
    return known


def _code(layer: str) -> dict[str, str]:
    """Hashes of the files that a layer's outcome depends on."""
    paths = [p for pattern in DEPENDS[layer] for p in files.ROOT.glob(pattern)]
    return {str(p.relative_to(files.ROOT)): files.sha256(p) for p in sorted(paths)}


@entry("mutants", MutantsConfig)
@resumable()
def main(cfg: MutantsConfig) -> None:
    """Try all mutants, classify what got through, write the results."""
    reasons = mutants_page.reasons(files.here(Path(cfg.harmless)))
    about = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": files.command(),
        "environment": files.environment("cpu"),
    }
    if cfg.again:
        found = former(Path(cfg.out))
        mutants_page.summary(found["mutants"], reasons)
        now = {row["key"]: row for row in run(cfg, let_through(found["mutants"]))}
        for row in found["mutants"]:
            if row["key"] in now:
                row["again"] = {layer: now[row["key"]][layer] for layer in cfg.layers}
        found |= mutants_page.summary(found["mutants"], reasons) | {"again": about}
    else:
        rows = run(cfg, chosen(cfg))
        found = {**mutants_page.summary(rows, reasons), "tokens": cfg.tokens, "seed": cfg.seed}
        found |= {**about, "mutants": rows}
    files.write_json(Path(cfg.out), found)
    print(f"{cfg.out}: {mutants_page.line(found)}")
    if found["open"]:
        raise CheckFailed(
            f"{len(found['open'])} mutants got through and are not explained: see {cfg.out}"
        )


if __name__ == "__main__":
    main()
