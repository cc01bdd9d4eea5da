"""Decode prompts with a trained drafter and keep every round: where it was asked, how far it
got, what was rejected, and the target's law there. A second stage of training then learns at
exactly these places:

    python scripts/log_rounds.py target=smollm2 drafter=runs/dflash prompts=FILE out=runs/rounds
    accelerate launch train/block.py target=smollm2 head=dflash start=runs/dflash \\
        data=rounds data.path=runs/rounds out_dir=runs/dflash2 steps=N

Chains alone are logged. OUT holds rounds.safetensors and rounds.json (train/stored/rounds.py);
it is written in one go, when all prompts are done.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

if __name__ == "__main__":  # else scripts/ comes first and shadows libraries
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from conf.errors import UserError
from conf.rules import NotNegative, OneOrMore, Seed, one_of
from conf.schema import entry
from decode.engine import Request, generate
from decode.models.load import DTYPES, TargetConfig, load_target
from decode.sampling import Sampling
from heads import names, resolve_drafter
from heads.checkpoint import staged
from scripts.common import files
from scripts.common.prompts import load_prompts, question_ids
from train.stored import rounds


@dataclass
class RoundsConfig:
    """Keys of scripts/log_rounds.py."""

    # run folder or head folder; it drafts chains
    drafter: str
    # folder to write
    out: str
    # the target that the head was trained for
    target: TargetConfig = field(default_factory=TargetConfig)
    # JSONL of prompts or conversations, of which the first user turn is asked
    prompts: str = "scripts/prompts/demo.jsonl"
    # how many of them; null = all
    num_prompts: OneOrMore | None = None
    # most tokens of an answer
    max_new_tokens: OneOrMore = 128
    # sampling temperature of the answers; 0 = greedy
    temperature: NotNegative = 0.0
    # tokens of the target's law that are kept at every place
    top_k: OneOrMore = 32
    # prompts decoded at the same time
    batch_size: OneOrMore = 8
    # of every random number
    seed: Seed = 0
    # of the target
    dtype: Annotated[str, one_of(DTYPES)] = "bfloat16"
    # cpu, cuda, cuda:1; null = the GPU when there is one
    device: str | None = None

    def validate(self) -> list[str]:
        """Problems as "key: value; rule; fix"."""
        if self.drafter == names.NONE:
            return ["drafter: none drafts nothing; give a trained head"]
        return []


@entry("log_rounds", RoundsConfig)
def main(cfg: RoundsConfig) -> int:
    """Decode, then write the folder."""
    out = Path(cfg.out).expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"out: {out} exists; give another folder")
    files.check_out(out / "rounds")
    sampling = Sampling(cfg.temperature)
    known = load_prompts(cfg.prompts)[: cfg.num_prompts]
    target = load_target(cfg.target, cfg.dtype, cfg.device)
    drafter = resolve_drafter(cfg.drafter, target)
    if getattr(drafter, "shape", "chain") != "chain":
        raise UserError(f"drafter: {cfg.drafter} drafts trees; give a head and @chain")
    room = target.context_length - cfg.max_new_tokens
    every = (question_ids(target.tokenizer, prompt.turns[0]) for prompt in known)
    texts = [ids for ids in every if len(ids) < room]
    asked = [Request(ids, cfg.max_new_tokens, id=i) for i, ids in enumerate(texts)]
    if not asked:
        raise UserError(
            f"prompts: none of {cfg.prompts} leaves room for {cfg.max_new_tokens} tokens"
        )
    rule = rounds.Rounds("traversal", asked, drafter.max_depth, cfg.top_k)
    run = generate(
        target,
        drafter,
        asked,
        sampling,
        batch_size=cfg.batch_size,
        seed=cfg.seed,
        verify=rule,
        coins=rule.coins,
    )
    tensors = rule.tensors([(g.prompt_ids, g.token_ids) for g in run.generations])
    if not len(tensors["row"]):
        raise UserError(f"drafter: {cfg.drafter} drafted nothing that lies inside an answer")
    about = {
        "drafter": cfg.drafter,
        "target": target.identity.to_json() if target.identity is not None else None,
        "sampling": asdict(sampling),
        "seed": cfg.seed,
        "top_k": cfg.top_k,
    }
    with staged(out) as stage:
        rounds.write(stage, tensors, about)
    hits = int(tensors["accepted"].sum())
    count = len(tensors["row"])
    print(f"{out}: {count:,} rounds of {len(asked)} answers, {hits / count:.2f} accepted in each")
    return 0


if __name__ == "__main__":
    main()
