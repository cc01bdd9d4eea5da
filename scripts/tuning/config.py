"""The keys of scripts/tune.py."""

from __future__ import annotations

from dataclasses import dataclass, field

from decode.models.load import TargetConfig
from decode.verify import RULES


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
