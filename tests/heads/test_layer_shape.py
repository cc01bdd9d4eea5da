"""The make of a head's own decoder layers: what it takes from the target, what its keys choose, and
what cards without those keys mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.conf.errors import UserError
from outrider.conf.schema import compose
from outrider.conf.typed import from_json
from outrider.decode.target import Target
from outrider.heads import HEADS, load_head, save_head
from outrider.heads.base import Head
from outrider.heads.checkpoint import CARD, _card_sha256, read_card, text_of
from outrider.heads.earlier import LAYER
from outrider.heads.warm import Start
from outrider.train.config import EagleRun
from outrider.train.loop import fit
from outrider.train.state import MANIFEST, STATE, _sha256
from tests.helpers.archs import VOCAB, build
from tests.helpers.training import chats, overrides, random_batch

WITH_LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle1": ("eagle1", {"draft_vocab": 0}),
    "eagle3": ("eagle3", {"draft_vocab": 20}),
    "p_eagle": ("eagle3", {"draft_vocab": 20, "parallel": True, "layers": 2}),
    "dflash": ("dflash", {"draft_vocab": 20, "block": 4, "layers": 1}),
    "dspark": ("dspark", {"draft_vocab": 20, "block": 3, "layers": 1, "markov_rank": 2}),
    "hydra": ("hydra_heads", {"draft_vocab": 20, "heads": 2, "prefix_layers": 1}),
}
OLD = {"hidden_act": "gelu_pytorch_tanh", "intermediate_size": 48}  # as Gemma's, before the keys


def made(target: Target, name: str, **keys: Any) -> Head:
    kind, own = WITH_LAYERS[name]
    torch.manual_seed(5)
    cls = HEADS[kind]
    own = {**own, "kind": kind} if kind != "hydra_heads" else own
    return cls.for_target(target, cls.Config(**own, **keys), torch.arange(VOCAB) + 1).eval()


def layer(head: Head) -> dict[str, Any]:
    message = head.config_json()
    return message.get("layer") or message["prefix"]


@pytest.mark.parametrize("name", WITH_LAYERS)
@pytest.mark.parametrize("arch, inner", [("gemma3_text", 48), ("mixtral", 128), ("llama", 48)])
def test_layers_have_silu_and_are_wide_behind_experts(name: str, arch: str, inner: int) -> None:
    """Whatever the target's activation is: engines' draft layers know silu alone."""
    target = Target(build(arch))
    head = made(target, name)
    assert layer(head)["hidden_act"] == "silu" and layer(head)["intermediate_size"] == inner
    assert head.cfg.hidden_act == "silu" and head.cfg.intermediate_size == inner
    chosen = made(target, name, intermediate_size=80, hidden_act="relu")
    assert layer(chosen)["hidden_act"] == "relu" and layer(chosen)["intermediate_size"] == 80


def test_an_activation_that_nobody_knows_is_refused() -> None:
    _, problems = from_json({"hidden_act": "x"}, HEADS["eagle3"].Config)
    assert problems and problems[0].startswith("hidden_act: ")


def as_earlier(folder: Path) -> None:
    """Rewrite a card as a version without the keys wrote it."""
    card = json.loads((folder / CARD).read_text())
    for key in LAYER:
        del card["head"]["config"][key]
    card["head"].pop("reads_table", None)
    card["sha256"] = _card_sha256(card)
    (folder / CARD).write_text(text_of(card))


@pytest.mark.parametrize("name", WITH_LAYERS)
def test_a_card_without_the_keys_keeps_what_it_was_made_with(tmp_path: Path, name: str) -> None:
    target = Target(build("gemma3_text"))
    head, batch = made(target, name, **OLD), random_batch(vocab=VOCAB)
    if name != "hydra":  # whose embeddings are those of the target, at a scale of their own
        head.reads_table = False
    save_head(head, tmp_path, target.identity)
    as_earlier(tmp_path)
    again = load_head(tmp_path, target)
    assert layer(again) == layer(head) and again.cfg.hidden_act == OLD["hidden_act"]
    both = ([t for *_, t in one.forced(batch, target, 2)] for one in (head, again))
    assert all(a.equal(b) for a, b in zip(*both, strict=True))
    other = made(target, name)
    plain = [t for *_, t in other.forced(batch, target, 2)]
    if name != "hydra":  # whose fresh prefix layers are the identity
        assert not plain[0].equal(next(iter(again.forced(batch, target, 2)))[2])


@pytest.mark.parametrize("name", WITH_LAYERS)
def test_a_warm_start_names_the_keys_of_layers_of_another_make(tmp_path: Path, name: str) -> None:
    target = Target(build("gemma3_text"))
    save_head(made(target, name, hidden_act="gelu_pytorch_tanh"), tmp_path, target.identity)
    as_earlier(tmp_path)
    start = Start(str(tmp_path), WITH_LAYERS[name][0], target)
    with pytest.raises(UserError, match="^start: .*; give head.hidden_act=gelu_pytorch_tanh$"):
        start.give(made(target, name))
    same = made(target, name, hidden_act="gelu_pytorch_tanh")
    start.give(same)
    assert not getattr(same, "reads_table", False)
    with pytest.raises(UserError, match="^start: .*; give head.intermediate_size=48$"):
        start.give(made(target, name, hidden_act="gelu_pytorch_tanh", intermediate_size=80))


def run(data: Path, out: Path, *keys: str) -> Path:
    given = [key for key in overrides(data, out, *keys) if not key.startswith("head.heads=")]
    fit(compose("eagle", EagleRun, given), HEADS["eagle3"])
    return out


def test_an_earlier_run_goes_on_with_its_own_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One on a target of another activation is not gone on with under silu: the weights would
    fit, and mean something else."""
    data = chats(tmp_path / "data.jsonl")
    keys = ("head=eagle3", "head.draft_vocab=20", "target.arch=gemma3_text")
    own = (*keys, "head.hidden_act=gelu_pytorch_tanh")
    out = run(data, tmp_path / "run", *own, "steps=2", "save_every=2")
    message = capsys.readouterr().err
    assert (
        "no engine, as it stands" in message and "not as sglang" in message
    )  # two layers, three taps
    (checkpoint,) = (out / "checkpoints").iterdir()
    as_earlier(checkpoint)
    state = json.loads((checkpoint / STATE).read_text())
    for key in LAYER:
        del state["meaning"][f"head.{key}"]
    (checkpoint / STATE).write_text(json.dumps(state))
    resealed(checkpoint)
    for folder in ("head", "best"):
        if (out / folder).exists():
            as_earlier(out / folder)
    more = ("steps=3", "save_every=2")
    with pytest.raises(UserError, match="head.hidden_act: gelu_pytorch.* in the checkpoint, silu"):
        run(data, out, *keys, *more)
    run(data, out, *own, *more)
    card = read_card(out / "head")
    assert card["extra"]["step"] == 3 and card["head"]["layer"]["hidden_act"] == OLD["hidden_act"]
    assert card["head"]["reads_table"] is False


def resealed(checkpoint: Path) -> None:
    """Write the manifest of changed files anew."""
    from outrider.decode.models.identity import sha256_file

    manifest = json.loads((checkpoint / MANIFEST).read_text())
    for name in manifest["files"]:
        file = checkpoint / name
        manifest["files"][name] = {"bytes": file.stat().st_size, "sha256": sha256_file(file)}
    del manifest["sha256"]
    (checkpoint / MANIFEST).write_text(text_of({**manifest, "sha256": _sha256(manifest)}))
