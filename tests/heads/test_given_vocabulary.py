"""head.draft_vocab_from: the draft vocabulary of another head."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.conf.errors import UserError
from outrider.heads import load_head
from outrider.heads.base import HeadConfig
from outrider.heads.given import vocabulary_in
from outrider.heads.vocab import choose
from outrider.train.resolve import draft_vocabulary
from tests.helpers.training import chats, run, tiny_target

SIZE = 260
IDS = torch.tensor([3, 10, 32, 97, 101, 110, 116, 120])


def export(folder: Path, **tensors: torch.Tensor) -> str:
    """A foreign head's folder."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"draft_vocab_size": IDS.numel()}))
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def offsets(ids: torch.Tensor = IDS) -> torch.Tensor:
    return ids - torch.arange(ids.numel())


def marks(ids: torch.Tensor = IDS, size: int = SIZE) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.bool).index_fill_(0, ids, True)


@pytest.mark.parametrize(
    "tensors",
    [
        {"d2t": offsets()},
        {"d2t": offsets().int(), "t2d": marks()},
        {"t2d": marks()},
        {"token_map": IDS},
        {"draft_model.d2t": offsets(), "draft_model.t2d": marks()},
    ],
    ids=["d2t", "both", "t2d", "token_map", "prefixed"],
)
def test_exports_give_their_tokens(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    found = vocabulary_in(export(tmp_path / "head", **tensors), SIZE)
    assert torch.equal(found, IDS) and found.dtype == torch.int64


@pytest.mark.parametrize(
    "tensors, said",
    [
        ({"fc.weight": torch.zeros(2, 2)}, "drafts from all tokens"),
        ({"d2t": offsets(IDS + 200)}, "leaves the vocabulary"),
        ({"d2t": offsets(IDS.flip(0))}, "do not ascend"),
        ({"d2t": offsets(torch.tensor([4, 4, 5]))}, "do not ascend"),
        ({"d2t": offsets(), "t2d": marks(IDS[1:])}, "marks 7 tokens"),
        ({"d2t": offsets(), "t2d": marks(IDS + 1)}, "does not mark"),
        ({"t2d": marks(size=SIZE + 1)}, "t2d has 261 tokens, the target 260"),
        ({"d2t": offsets().float()}, "no list of tokens"),
        ({"d2t": offsets()[None]}, "no list of tokens"),
        ({"d2t": offsets()[:0]}, "no list of tokens"),
        ({"t2d": torch.zeros(SIZE, dtype=torch.bool)}, "not different ones"),
        ({"token_map": IDS.flip(0)}, "not different ones"),
        ({"token_map": torch.tensor([-1, 4])}, "not different ones"),
    ],
)
def test_what_is_no_vocabulary_is_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], said: str
) -> None:
    with pytest.raises(UserError, match=said) as caught:
        vocabulary_in(export(tmp_path / "head", **tensors), SIZE)
    assert "\n" not in str(caught.value)


def test_folders_that_hold_no_head(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="head.draft_vocab_from: .* is no folder"):
        vocabulary_in(str(tmp_path / "none"), SIZE)
    with pytest.raises(UserError, match="holds no weights"):
        vocabulary_in(str(tmp_path), SIZE)


def test_a_run_takes_it_and_resumes_by_its_tokens(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A head with the tokens of an export, one with those of that head, and a resume that other
    tokens refuse; head.json does not say where they came from."""
    data = chats(tmp_path / "data.jsonl")
    given = export(tmp_path / "export", d2t=offsets(), t2d=marks())
    first = run(data, tmp_path / "first", f"head.draft_vocab_from={given}", "steps=2")
    said = capfd.readouterr().err
    assert f"the 8 tokens of {given}, " in said
    card = json.loads((first / "head" / "head.json").read_text())["head"]["config"]
    assert card["draft_vocab"] == 8 and "draft_vocab_from" not in card
    head = load_head(first / "head", tiny_target())
    assert torch.equal(head.ids(), IDS) and 0 < head.coverage < 1

    second = run(data, tmp_path / "second", f"head.draft_vocab_from={first}", "steps=2")
    assert torch.equal(load_file(second / "head" / "head.safetensors")["d2t"], offsets())
    run(data, first, f"head.draft_vocab_from={second}", "steps=3")
    other = export(tmp_path / "other", d2t=offsets(IDS + 1))
    with pytest.raises(UserError, match="head.draft_vocab_from"):
        run(data, first, f"head.draft_vocab_from={other}", "steps=4")
    whole = run(data, tmp_path / "whole", "steps=1")
    with pytest.raises(UserError, match="drafts from all tokens"):
        run(data, tmp_path / "third", f"head.draft_vocab_from={whole}")
    weights = first / "head" / "head.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x55")
    with pytest.raises(UserError, match="damaged"):
        vocabulary_in(str(first), SIZE)


def test_its_size_is_its_own(tmp_path: Path) -> None:
    """As many as there are, also tokens that the data never supervise."""

    keys = HeadConfig(draft_vocab_from=export(tmp_path / "head", d2t=offsets()))
    counts = torch.zeros(SIZE, dtype=torch.int64)
    counts[97] = 5
    size, ranked, note = draft_vocabulary(keys, counts)
    assert "the 8 tokens of" in note and "1 of them supervised" in note and size == 8
    assert torch.equal(choose(ranked, 8), IDS)
    assert draft_vocabulary(HeadConfig(draft_vocab=1), counts) == (1, counts, "")
