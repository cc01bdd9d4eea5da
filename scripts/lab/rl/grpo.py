"""GRPO on the tiny target whose rollouts our engine drafts, behind the gate.

    python -m venv rl && rl/bin/pip install -e . trl    # TRL is no dependency of ours
    rl/bin/python scripts/lab/rl/grpo.py exact typical deferred

TRL asks `rollout_func` for rollouts; here that is `DraftedRollouts`, which brings the engine's
weights up to date, decodes, scores the tokens under the trainer's own model and asks the gate. The
first word said no ends the training. The draft is written by the untrained policy's own first
layer, so it is wrong often and more so with every step; an exact rule does not care. Figures go to
docs/results/rl-gate.json.

Shape letters: B rollouts, T tokens, V vocabulary.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # else this folder comes first
    sys.path[0] = str(Path(__file__).resolve().parents[3])

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from outrider.decode.drafters import Drafter, DraftModel
from outrider.decode.engine import Request, generate
from outrider.decode.models.tiny import byte_tokenizer, tiny_model
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.scripts.common import files
from outrider.scripts.extra.rl_gate.gate import Gate, GateVerdict
from outrider.scripts.proofs.controls.field import deferred_acceptance, flat
from outrider.scripts.proofs.controls.row_rules import Rule
from outrider.scripts.proofs.controls.rules import typical_acceptance

VOCAB, DEPTH, GENERATIONS, ROLLOUTS, LENGTH = 320, 4, 8, 32, 32
OUT = files.ROOT / "docs/results/rl-gate.json"
ENGINES: dict[str, str | Rule] = {
    "exact": "traversal",
    "typical": typical_acceptance,
    "deferred": deferred_acceptance(1, flat),
}


def columns(logits: Tensor, tokens: Tensor) -> dict[str, Any]:
    """The gate's columns, numpy [B, T], of `tokens` [B, T] under logits [B, T, V] that are
    divided by the temperature already. This is all that a trainer has to add to its own pass."""
    logp = logits.float().log_softmax(-1)
    own, p = logp.gather(-1, tokens[..., None])[..., 0], logp.exp()
    entropy = -(p * logp).sum(-1)
    far = (logp + entropy[..., None]).abs()
    found = {
        "logprob": own,
        "entropy": entropy,
        "variance": (p * (logp + entropy[..., None]) ** 2).sum(-1),
        "above": (p * (logp > own[..., None])).sum(-1),
        "beyond": (p * (far > far.gather(-1, tokens[..., None]))).sum(-1),
    }
    return {name: column.cpu().numpy() for name, column in found.items()}


class NotFromPolicy(RuntimeError):
    """The gate said no."""


class DraftedRollouts:
    """Rollouts of the engine, in the form that TRL's `rollout_func` gives back. verdicts: the
    gate's words after every batch."""

    def __init__(self, target: Target, drafter: Drafter, rule: str | Rule, gate: Gate) -> None:
        self.target, self.drafter, self.rule, self.gate = target, drafter, rule, gate
        self.verdicts: list[GateVerdict] = []
        self.count = 0

    def __call__(self, prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        """`trainer.model` is the policy. Raises NotFromPolicy when the gate says no."""
        policy: nn.Module = trainer.model
        self.target.model.load_state_dict(policy.state_dict())
        ids = [self.target.tokenizer(prompt)["input_ids"] for prompt in prompts]
        requests = [Request(p, LENGTH, id=self.count + i) for i, p in enumerate(ids)]
        self.count += len(requests)
        run = generate(
            self.target, self.drafter, requests, Sampling(1.0), len(requests), verify=self.rule
        )
        answers = [g.token_ids for g in run.generations]
        found, mask = scored(policy, ids, answers)
        self.verdicts.append(self.gate.add(**found, mask=mask))
        if not self.verdicts[-1]:
            raise NotFromPolicy(str(self.verdicts[-1]))
        logprobs = [
            line[: len(answer)].tolist()
            for line, answer in zip(found["logprob"], answers, strict=True)
        ]
        return {"prompt_ids": ids, "completion_ids": answers, "logprobs": logprobs}


def scored(
    policy: nn.Module, prompts: Sequence[list[int]], answers: Sequence[list[int]]
) -> tuple[dict[str, Any], Any]:
    """The columns [B, T] of the answers behind their prompts, and their mask [B, T]."""
    texts = [torch.tensor(p + a) for p, a in zip(prompts, answers, strict=True)]
    ids = pad_sequence(texts, batch_first=True)
    with torch.inference_mode():
        logits = policy(input_ids=ids).logits[:, :-1]
    width = max(map(len, answers))
    place = torch.tensor([len(p) - 1 for p in prompts])[:, None] + torch.arange(width)
    mask = torch.arange(width) < torch.tensor(list(map(len, answers)))[:, None]
    place = place.clamp(max=logits.shape[1] - 1)
    logits = logits.gather(1, place[..., None].expand(-1, -1, logits.shape[-1]))
    return columns(logits, ids.gather(1, place + 1)), mask.numpy()


def engine(rule: str | Rule, gate: Gate, dtype: torch.dtype = torch.float32) -> DraftedRollouts:
    """Ours, on the tiny target in `dtype`; its drafter is the target's own first layer."""
    model = tiny_model(vocab=VOCAB)
    draft = tiny_model(vocab=VOCAB, layers=1)
    draft.load_state_dict(model.state_dict(), strict=False)
    target = Target(model.to(dtype), byte_tokenizer(VOCAB))
    return DraftedRollouts(target, DraftModel(Target(draft.to(dtype)), DEPTH), rule, gate)


def reward(completions: Sequence[str], **_: Any) -> list[float]:
    """The share of letters."""
    return [sum(c.isascii() and c.isalpha() for c in text) / LENGTH for text in completions]


def train(rollouts: DraftedRollouts, steps: int) -> list[float]:
    """Rewards of every step of GRPO; it ends early where the gate says no."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    policy = copy.deepcopy(rollouts.target.model).float().requires_grad_(True)
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=ROLLOUTS,
            num_generations=GENERATIONS,
            max_completion_length=LENGTH,
            max_steps=steps,
            learning_rate=1e-3,
            temperature=1.0,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=policy,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": f"{i} and"} for i in range(100)]),
            processing_class=rollouts.target.tokenizer,
            rollout_func=rollouts,
        )
        try:
            trainer.train()
        except NotFromPolicy as no:
            print(no)
    return [row["reward"] for row in trainer.state.log_history if "reward" in row]


def main(names: Sequence[str], steps: int = 10) -> None:
    """One training for each of ENGINES that is named."""
    for name in names:
        rollouts = engine(ENGINES[name], Gate())
        rewards = train(rollouts, steps)
        last = rollouts.verdicts[-1]
        known = json.loads(OUT.read_text()) if OUT.exists() else {}
        known.setdefault("grpo", {})[name] = {
            "steps": len(rewards),
            "rewards": [round(r, 4) for r in rewards],
            "ok": last.ok,
            "p": last.p,
            "tokens": last.tokens,
            "by": last.by,
            "shift": last.shift,
            **files.origin(),
        }
        files.write_json(OUT, known)
        print(f"{name}: {last}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
