"""Choose K, tree shape and tree size for a drafter on this machine, and say what it will
bring.

    python scripts/tune.py target=smollm2 drafter=runs/medusa out=reports/tune-medusa
    python scripts/tune.py target=smollm2 drafter=runs/eagle3 out=reports/tune-eagle3 grid=true
    python scripts/tune.py formula acceptance=0.7 cost=0.05

Measures the latency curves inside the decode loop, drafts once along the target's plain
answers, searches every setting by replay, confirms the best few by interleaved measurement,
and writes the winner into the head's folder (decode.json), where evaluate, chat and export
read it. OUT gets tune.json, tune.html and figures/*.png. With grid=true the choice is checked
against a grid of settings that are all measured; results=FILE collects the verdicts of several
runs. `formula` prints the closed formulas of the literature.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # else scripts/ comes first and shadows libraries
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from rich.console import Console

from conf.errors import UserError
from conf.schema import entry
from decode.models.load import TargetConfig, load_target
from decode.models.memory import Plan
from decode.verify import RULES
from heads import drafter_folder, settings_folder
from heads.names import Draft, parse
from heads.tuned import DECODE
from scripts.common import files
from scripts.common.progress import Steps, columns
from scripts.common.prompts import load_prompts
from scripts.reports import tune_table
from scripts.reports.wandb_log import to_wandb
from scripts.tuning import run as tune_run


@dataclass
class TuneConfig:
    """Keys of scripts/tune.py."""

    # ngram, a run folder, a head folder or a smaller model; FOLDER@chain and FOLDER@tree
    # search that shape alone
    drafter: str
    # folder for tune.json, tune.html and figures/
    out: str
    # the frozen model
    target: TargetConfig = field(default_factory=TargetConfig)
    # prompts like those that will be asked: acceptance depends on them
    prompts: str = "scripts/prompts/demo.jsonl"
    # how many of them, spread over the file
    num_prompts: int = 16
    # longest answer, tokens
    max_new_tokens: int = 64
    # 0 = greedy
    temperature: float = 0.0
    # keep the k likeliest tokens; 0 = off
    top_k: int = 0
    # nucleus; 1 = off
    top_p: float = 1.0
    # drop tokens below this share of the best token's probability; 0 = off
    min_p: float = 0.0
    # Hugging Face's repetition penalty; 1 = off
    repetition_penalty: float = 1.0
    # float32, bfloat16 or float16
    dtype: str = "bfloat16"
    # cpu, cuda, cuda:1; null = the GPU when there is one
    device: str | None = None
    # prompts that are decoded together: what the choice is made for
    batch_size: int = 1
    # further batch sizes of the latency curve
    curve_batches: list[int] = field(default_factory=lambda: [1, 2, 4, 8])
    # repetitions of every point of the latency curve
    curve_rounds: int = 5
    # deepest chain or dynamic tree
    max_depth: int = 8
    # largest tree
    max_nodes: int = 64
    # widest beam of a dynamic tree
    max_width: int = 8
    # settings that are confirmed by measurement
    confirm: int = 4
    # measure a whole grid of settings as well, and say how far the choice is from its best
    grid: bool = False
    # settings of each shape in that grid
    grid_size: int = 8
    # JSON file that collects what runs came to, an entry per drafter; "" = none
    results: str = ""
    # write the choice into the head's folder
    write: bool = True
    # log figures and table to Weights & Biases
    wandb: bool = False
    # rule of verification
    verify: str = "traversal"
    # addresses all random numbers
    seed: int = 0
    # no progress bar
    quiet: bool = False

    def validate(self) -> list[str]:
        lows = (
            ("num_prompts", 2),
            ("max_new_tokens", 8),
            ("batch_size", 1),
            ("curve_rounds", 1),
            ("max_depth", 1),
            ("max_nodes", 1),
            ("max_width", 1),
            ("confirm", 1),
            ("grid_size", 1),
        )
        found = [
            f"{key}: {getattr(self, key)} is below {low}; set {low} or more"
            for key, low in lows
            if getattr(self, key) < low
        ]
        if any(b < 1 for b in self.curve_batches):
            found.append(
                f"curve_batches: {self.curve_batches} holds a size below 1; give sizes "
                "such as [1,4]"
            )
        if self.verify not in RULES:
            found.append(f"verify: {self.verify} is no rule; choose among {', '.join(RULES)}")
        return found


@entry("tune", TuneConfig)
def main(cfg: TuneConfig) -> None:
    """Measure, search, confirm, write."""
    out = Path(cfg.out)
    if out.exists() and not out.is_dir():
        raise UserError(f"out: {out} is a file; give a folder")
    with files.sole_writer(out):
        tuned(cfg, out)


def tuned(cfg: TuneConfig, out: Path) -> None:
    """The run behind `main`."""
    console = Console()
    draft = parse(cfg.drafter)
    drafter_folder(draft)  # what is not there is said before the target is loaded
    longest = (
        max(len(p.turns[0]) for p in load_prompts(cfg.prompts)) // 2
    )  # a token is two letters or more
    plan = Plan(
        max(cfg.batch_size, *cfg.curve_batches), longest + cfg.max_new_tokens, cfg.max_nodes
    )
    target = load_target(cfg.target, cfg.dtype, cfg.device, plan)
    with Steps(*columns(20), console=console, quiet=cfg.quiet, transient=True) as progress:
        report = tune_run.run(cfg, target, progress)
    from scripts.reports import tune_page  # matplotlib is slow to import

    tune_page.write(report, out)
    tune_table.show(report, console)
    folder = settings_folder(draft)
    if cfg.write and folder is not None:
        files.write_json(folder / DECODE, tune_run.tuned_from(report, folder).to_json())
        console.print(
            f"written: {folder / DECODE}; evaluate, chat and export read it", highlight=False
        )
    elif cfg.write:
        name = asked_as(draft.source, report["chosen"]["settings"])
        console.print(
            f"{draft.source} has no folder to write to; ask for it as {name}", highlight=False
        )
    if cfg.results:
        tune_run.collect(report, Path(cfg.results))
        console.print(f"written: {cfg.results}", highlight=False)
    if cfg.wandb:
        to_wandb(report, out, "tune")
    console.print(f"report: {out / 'tune.html'}", highlight=False)


def asked_as(source: str, best: dict[str, Any]) -> str:
    """The name that asks for the chosen depth of a chain or nodes of a tree."""
    if best["shape"] == "chain":
        return str(Draft(source, "chain", depth=best["depth"]))
    return str(Draft(source, "tree", nodes=best["nodes"]))


def command(argv: Sequence[str] | None = None) -> None:
    """`tune.py formula ...` or `tune.py KEY=VALUE ...`."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] == ["formula"]:
        from scripts.formula import main as formula

        formula(args[1:])
    main(args)


if __name__ == "__main__":
    command()
