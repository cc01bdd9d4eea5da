"""Choose K, tree shape and tree size for a drafter on this machine.

    outrider tune target=smollm2 drafter=runs/eagle3 out=reports/tune-eagle3

Times chains and trees of many sizes, interleaves the fastest few with plain decoding, and writes
the fastest into the head's folder (decode.json), where evaluate, chat and export read it; nothing
is written where none is faster than plain decoding beyond chance. OUT gets tune.json, which
overwrite=true alone replaces where it is of something else.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from outrider.conf.errors import UserError
from outrider.conf.schema import entry
from outrider.decode.models.load import load_target
from outrider.decode.models.memory import MemoryPlan
from outrider.heads.drafters import drafter_folder, refuse_other, settings_folder
from outrider.heads.names import DraftSpec, parse
from outrider.heads.tuned import DECODE
from outrider.scripts.common import files
from outrider.scripts.common.prompts import load_prompts
from outrider.scripts.reports import tune_table
from outrider.scripts.tuning import run as tune_run
from outrider.scripts.tuning.config import TuneConfig


@entry("tune", TuneConfig)
def main(cfg: TuneConfig) -> None:
    """Try, measure, write."""
    out = Path(cfg.out)
    with files.sole_writer(out):
        files.unclaimed(out / "tune.json", files.asked(cfg, ["write"]), cfg.overwrite)
        tuned(cfg, out)


def tuned(cfg: TuneConfig, out: Path) -> None:
    """The run behind `main`."""
    console = Console()
    draft = parse(cfg.drafter)
    if draft.parts:
        raise UserError(
            f"drafter: {cfg.drafter}: a union drafts as its drafters were tuned; tune each by "
            f"itself, the first with drafter={draft.parts[0].source}"
        )
    refuse_other([cfg.drafter], cfg.target)
    drafter_folder(draft)  # what is not there is said before the target is loaded
    longest = (
        max(len(p.turns[0]) for p in load_prompts(cfg.prompts)) // 2
    )  # a token is two letters or more
    plan = MemoryPlan(cfg.batch_size, longest + cfg.max_new_tokens, cfg.max_nodes)
    target = load_target(cfg.target, cfg.dtype, cfg.device, plan)
    report = tune_run.run(cfg, target, console) | {"asked": files.asked(cfg, ["write"])}
    files.write_json(out / "tune.json", report)
    tune_table.table(report).show(console)
    folder, best = settings_folder(draft), report["chosen"]["settings"]
    if not report["chosen"]["pays"]:
        said = "nothing is written beside the drafter: plain decoding may be as fast"
    elif cfg.write and folder is not None:
        files.write_json(folder / DECODE, tune_run.tuned_from(report, folder).to_json())
        said = f"written: {folder / DECODE}; evaluate, chat and export read it"
    else:
        name = DraftSpec(
            draft.source, **{key: best.get(key) for key in ("shape", "depth", "nodes")}
        )
        said = f"nothing is written beside {draft.source}; ask for it as {name}"
    console.print(f"{said}\nreport: {out / 'tune.json'}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
