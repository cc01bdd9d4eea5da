"""Rounds of our own decoding, kept to train on: where a drafter was asked, how far it got, what
was rejected, and the target's law at every one of these places.

A folder holds rounds.safetensors and rounds.json (its sha256, target, drafter, settings). The
tensors, for R texts end to end and N rounds of at most K drafted tokens:

    ids [S] int32, answer [S] bool, offsets [R + 1] int64      the texts
    row, anchor, accepted [N] int64                            anchor: place in its text of the
                                                               newest token when it was drafted
    drafted [N, K] int32                                       -1 behind the draft's end
    law.ids [N, K + 1, k] int32, law.p [N, K + 1, k] float32   the k most probable tokens behind
                                                               the anchor and each drafted one,
                                                               best first; the rest has 1 - sum

As training data (data=rounds data.path=FOLDER) a text is a row, and each anchor carries its
`reach`: the accepted tokens and the first rejected place. Heads that know anchors (EAGLE, block
heads) learn there alone, from the text's own tokens, which behind an accepted prefix are the
target's.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from conf.errors import UserError
from decode.engine import Request, Rule
from decode.models.identity import sha256_file
from decode.rng import Rng
from decode.sampling import Law
from decode.tree import DraftTree
from decode.verify import Coins, Verdict
from decode.verify import verify as run_verify

FORMAT = 1
WEIGHTS, CARD = "rounds.safetensors", "rounds.json"
AGAIN = "log the rounds again: scripts/log_rounds.py"
NAMES = ("ids", "answer", "offsets", "row", "anchor", "accepted", "drafted", "law.ids", "law.p")


class Rounds:
    """A rule that lets another decide and notes every round of a chain. levels: K. top_k: k.

    Use: generate(.., verify=rounds, coins=rounds.coins).
    """

    def __init__(self, rule: str, requests: Sequence[Request], levels: int, top_k: int) -> None:
        self.rule: Rule = functools.partial(run_verify, rule=rule)
        self.levels, self.top_k = levels, top_k
        self.length = {request.id: len(request.prompt) for request in requests}
        self.asked: list[int] = []
        self.found: list[tuple[int, int, int, list[int], Tensor, Tensor]] = []

    def coins(self, seed: int, requests: Tensor, cycles: Tensor) -> Rng:
        """The random numbers of the next verification, which tell whose rows they are."""
        self.asked = requests.tolist()
        return Rng(seed, requests, cycles)

    def __call__(self, tree: DraftTree, law: Law, rng: Coins) -> Verdict:
        """See decode.engine.Rule."""
        verdict = self.rule(tree, law, rng)
        tokens, sizes = tree.tokens.tolist(), tree.size.tolist()
        for b, (asked, accepted) in enumerate(
            zip(self.asked, verdict.length.tolist(), strict=True)
        ):
            if size := sizes[b] if tree.width else 0:
                p = law.logits[b, : size + 1].float().softmax(-1)
                best = p.topk(min(self.top_k, p.shape[-1]))
                anchor, drafted = self.length[asked] - 1, tokens[b][:size]
                laws = (best.indices.int().cpu(), best.values.cpu())
                self.found.append((asked, anchor, accepted, drafted, *laws))
            self.length[asked] += accepted + 1
        return verdict

    def tensors(self, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> dict[str, Tensor]:
        """What a folder holds. texts: prompt and answer of every request, in order of id; rounds
        behind an answer's end are left out."""
        ends = [len(prompt) + len(answer) for prompt, answer in texts]
        kept = [round for round in self.found if round[1] + 1 < ends[round[0]]]
        shape = (len(kept), self.levels + 1, self.top_k)
        drafted = torch.full((len(kept), self.levels), -1, dtype=torch.int32)
        ids, p = torch.zeros(shape, dtype=torch.int32), torch.zeros(shape)
        for n, (_, _, _, tokens, best, chance) in enumerate(kept):
            drafted[n, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
            ids[n, : len(best), : best.shape[1]] = best
            p[n, : len(best), : best.shape[1]] = chance
        flat = [token for prompt, answer in texts for token in (*prompt, *answer)]
        answer = [i >= len(text[0]) for text in texts for i in range(len(text[0]) + len(text[1]))]
        row, anchor, accepted = (
            torch.tensor([round[i] for round in kept], dtype=torch.int64) for i in range(3)
        )
        return {
            "ids": torch.tensor(flat, dtype=torch.int32),
            "answer": torch.tensor(answer, dtype=torch.bool),
            "offsets": torch.tensor([0, *ends], dtype=torch.int64).cumsum(0),
            "row": row,
            "anchor": anchor,
            "accepted": accepted,
            "drafted": drafted,
            "law.ids": ids,
            "law.p": p,
        }


def write(folder: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Into an existing folder; rounds.json last. about: further keys of it, plain JSON."""
    save_file(tensors, folder / WEIGHTS)
    (folder / WEIGHTS).chmod(0o644)
    card = {
        "format": FORMAT,
        "texts": len(tensors["offsets"]) - 1,
        "tokens": len(tensors["ids"]),
        "rounds": len(tensors["row"]),
        "accepted": int(tensors["accepted"].sum()),
        **about,
        "weights_sha256": sha256_file(folder / WEIGHTS),
    }
    (folder / CARD).write_text(json.dumps(card, indent=1) + "\n")


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(rounds.json, tensors). Raises UserError for a folder that is none, damaged, or whose
    places lie outside its texts."""
    path = folder / CARD
    try:
        card = json.loads(path.read_text())
        if card["format"] != FORMAT:
            raise UserError(f"{path}: format {card['format']}, this version reads {FORMAT}")
        if sha256_file(folder / WEIGHTS) != card["weights_sha256"]:
            raise UserError(f"{folder / WEIGHTS}: damaged (sha256 differs); {AGAIN}")
        tensors = load_file(folder / WEIGHTS)
    except FileNotFoundError as error:
        raise UserError(
            f"data.path: {folder} holds no rounds ({Path(error.filename).name} is missing); give "
            "a folder of scripts/log_rounds.py"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, SafetensorError, RecursionError) as error:
        raise UserError(f"{path}: unreadable ({type(error).__name__}); {AGAIN}") from None
    if set(tensors) != set(NAMES) or problems(tensors):
        found = problems(tensors) if set(tensors) == set(NAMES) else "tensors are missing"
        raise UserError(f"{folder / WEIGHTS}: {found}; {AGAIN}")
    return card, tensors


def problems(tensors: dict[str, Tensor]) -> str:
    """What is wrong with a folder's tensors, "" when nothing is."""
    offsets, row, anchor = (tensors[name] for name in ("offsets", "row", "anchor"))
    count = len(row)
    ascending = offsets.dim() == 1 and len(offsets) > 1 and bool((offsets.diff() > 0).all())
    if not ascending or int(offsets[0]) or int(offsets[-1]) != len(tensors["ids"]):
        return "its texts do not fill it"
    alike = all(len(tensors[n]) == count for n in NAMES[4:])
    if not alike or (count and not 0 <= int(row.min()) <= int(row.max()) < len(offsets) - 1):
        return "a round belongs to no text"
    if count and (int(anchor.min()) < 1 or bool((anchor + 1 >= offsets.diff()[row]).any())):
        return "an anchor lies outside its text"
    accepted, levels = tensors["accepted"], tensors["drafted"].shape[1]
    if count and not 0 <= int(accepted.min()) <= int(accepted.max()) <= levels:
        return "a round accepted more than was drafted"
    return ""


def reach(tensors: dict[str, Tensor]) -> Tensor:
    """[S] int64: from each anchor so many tokens are learned, the accepted ones and the first
    that was not; 0 where nothing was drafted."""
    out = torch.zeros(len(tensors["ids"]), dtype=torch.int64)
    drafted = (tensors["drafted"] >= 0).sum(1)
    far = torch.minimum(tensors["accepted"] + 1, drafted)
    out[tensors["offsets"][tensors["row"]] + tensors["anchor"]] = far
    return out
