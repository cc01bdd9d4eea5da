"""The figures of the exact layers behind docs/lossless.md, and the certificates beside them.

    python scripts/lab/prove.py  # the exact layers; merges into docs/results
    python scripts/lab/prove.py 'only=[certificates]' 'certificates=[certificates/medusa]'

enumeration    exact distribution of one verification on random worlds
engine         exact distribution of the whole loop
controls       known wrong code and the layer that catches it
certificates   what certify.py found

Every section goes on where it was stopped: parts wait in STATE, for as long as the code under
test stays the same. Entries keep command, commit and machine.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

if __name__ == "__main__":  # else scripts/ comes first and shadows libraries
    sys.path[0] = str(Path(__file__).resolve().parents[2])


from outrider.conf.errors import UserError, resumable
from outrider.conf.rules import OneOrMore, Seed, one_of
from outrider.conf.schema import entry
from outrider.scripts.common import files
from outrider.scripts.common.memo import Memo
from outrider.scripts.common.progress import OnProgress, Steps, by_name, columns
from outrider.scripts.lab.pages import lossless_page
from outrider.scripts.lab.proofs import sections as proofs
from outrider.scripts.proofs.controls.certificates import code_sha256


@dataclass(frozen=True)
class ProveConfig:
    """Keys of scripts/lab/prove.py."""

    # names of sections to run; [] = all that have what they need
    only: list[Annotated[str, one_of(SECTIONS)]] = field(default_factory=list)
    # JSON file; entries of sections that do not run now are kept
    out: str = "docs/results/lossless.json"
    # folder for the parts of unfinished sections
    state: str = "runs/prove"
    # random worlds of the section enumeration
    cases: OneOrMore = 2000
    # folders of the section certificates
    certificates: list[str] = field(default_factory=list)
    # seed of random worlds, draws and intervals
    seed: Seed = 0
    # no progress bar
    quiet: bool = False


def certificates(cfg: ProveConfig, on_progress: OnProgress) -> dict[str, Any]:
    """Certificates of scripts/certify.py, without folders of this machine and without the
    plots' data. Those of other drafters and settings that OUT holds already are kept.
    """
    known = json.loads(Path(cfg.out).read_text()) if Path(cfg.out).exists() else {}
    rows = {_certified(row): row for row in known.get("certificates", {}).get("rows", [])}
    for folder in cfg.certificates:
        path = Path(folder) / "certificate.json"
        try:
            paper = lossless_page.slim(json.loads(path.read_text()))
        except (OSError, ValueError) as error:
            raise UserError(
                f"certificates: {path}: {error}; give a folder that certify.py wrote"
            ) from None
        rows[_certified(paper)] = paper
    return {"rows": list(rows.values())}


def _certified(paper: dict[str, Any]) -> tuple[Any, ...]:
    """What a certificate is about: a later one of the same replaces it."""
    settings = paper["settings"]
    names = ("drafter", "temperature", "top_k", "top_p", "min_p", "verify", "dtype")
    return tuple(settings.get(name) for name in names)


def _toy(run: Callable[..., dict[str, Any]]) -> Callable[[ProveConfig, OnProgress], dict[str, Any]]:
    def section(cfg: ProveConfig, on_progress: OnProgress) -> dict[str, Any]:
        return run(Memo(Path(cfg.state) / run.__name__, {"code": code_sha256()}), on_progress)

    section.__doc__ = run.__doc__
    return section


def enumeration(cfg: ProveConfig, on_progress: OnProgress) -> dict[str, Any]:
    """Exact distribution of one verification on random worlds, every branch walked, both rules."""
    memo = Memo(Path(cfg.state) / "enumeration", {"code": code_sha256(), "seed": cfg.seed})
    return proofs.enumeration(cfg.cases, cfg.seed, memo, on_progress)


SECTIONS: dict[str, Callable[[ProveConfig, OnProgress], dict[str, Any]]] = {
    "enumeration": enumeration,
    "engine": _toy(proofs.engine),
    "controls": _toy(proofs.negative_controls),
    "certificates": certificates,
}


def wanted(cfg: ProveConfig) -> Sequence[str]:
    """The sections to run: those named, else all but the certificates where none are given."""
    if "certificates" in cfg.only and not cfg.certificates:
        raise UserError("certificates: the list is empty; give folders that certify.py wrote")
    return cfg.only or [name for name in SECTIONS if name != "certificates" or cfg.certificates]


@entry("prove", ProveConfig)
@resumable()
def main(cfg: ProveConfig) -> None:
    """Run the sections one by one; each is written as soon as it is there."""
    out = Path(cfg.out)
    with files.sole_folder(Path(cfg.state)):
        for name in wanted(cfg):
            with Steps(*columns(44), quiet=cfg.quiet) as bar:
                found = SECTIONS[name](cfg, by_name(bar))
            known = json.loads(out.read_text()) if out.exists() else {}
            about = " ".join((SECTIONS[name].__doc__ or "").split())
            known[name] = {"about": about, **found, **files.origin()}
            files.write_json(out, known)
            print(f"{name}: written to {out}")
    if out.resolve() == (files.ROOT / "docs" / "results" / "lossless.json").resolve():
        lossless_page.refresh()


if __name__ == "__main__":
    main()
