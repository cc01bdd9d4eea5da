"""hub:OWNER/NAME wherever a head may stand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.conf.errors import UserError
from outrider.decode.models.identity import sha256_weights
from outrider.decode.models.load import TargetConfig, published_weights
from outrider.heads import hub
from outrider.heads.checkpoint import load_head, read_card, save_head
from outrider.heads.drafters import refuse_other, resolve_drafter
from outrider.heads.folders import find_head, head_in, is_plain
from outrider.heads.names import parse
from outrider.heads.warm import Start
from tests.helpers.hub import FakeHub, fake_hub, forget, refusal
from tests.helpers.interop import deep_target, random_head


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub(tmp_path, monkeypatch) as found:
        yield found


@pytest.fixture(scope="module")
def target() -> Any:
    return deep_target()


@pytest.fixture(scope="module")
def eagle(target: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head folder."""
    folder = tmp_path_factory.mktemp("eagle") / "head"
    save_head(random_head(target, "eagle3"), folder, target.identity, {"step": 7})
    return folder


def own(folder: Path) -> dict[str, Path]:
    """The files of a head as a repository holds them."""
    return {f"head/{path.name}": path for path in folder.iterdir()}


def test_a_name_has_a_repository_a_revision_and_a_shape() -> None:
    for name, source, options in (
        ("hub:me/x", "hub:me/x", ("", None, None)),
        ("hub:me/x@v1", "hub:me/x@v1", ("", None, None)),
        ("hub:me/x@refs/pr/1@chain:4", "hub:me/x@refs/pr/1", ("chain", 4, None)),
        ("hub:me/x-1.5@v1.0@tree:16@adaptive", "hub:me/x-1.5@v1.0", ("tree", None, 16)),
    ):
        draft = parse(name)
        assert draft.source == source and str(draft) == name
        assert (draft.shape, draft.depth, draft.nodes) == options
        joined = parse(f"{name.partition('@adaptive')[0]}+ngram@tree")
        assert [part.source for part in joined.each] == [source, "ngram"]
    for slip in ("hub:me/x@tre:4", "hub:me/x@v1@tre", "hub:me/x@"):
        with pytest.raises(UserError, match="unknown shape"):
            parse(slip)


def test_a_head_is_fetched_once_and_is_the_one_that_was_put(
    server: FakeHub, target: Any, eagle: Path
) -> None:
    commit = server.put("me/x", {**own(eagle), "config.json": b"{}", "model.safetensors": b"big"})
    folder = find_head("hub:me/x")
    assert sorted(p.name for p in folder.iterdir()) == ["head.json", "head.safetensors"]
    assert not list(folder.parent.glob("*.safetensors")), "the engine's files are not wanted here"
    mine, theirs = (load_head(one, target).state_dict() for one in (eagle, folder))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine | theirs)
    assert hub.commits("hub:me/x@tree+ngram@tree") == {"hub:me/x": commit}
    asked = len(server.calls)
    assert head_in("hub:me/x") == folder and len(server.calls) == asked


def test_every_way_to_name_a_head_takes_one_of_the_hub(
    server: FakeHub, target: Any, eagle: Path
) -> None:
    commit = server.put("me/x", own(eagle))
    assert not is_plain("hub:me/x")
    drafter = resolve_drafter("hub:me/x@chain:2", target)
    assert drafter.name == "hub:me/x@chain:2" and drafter.max_depth == 2
    start = Start("hub:me/x", "eagle3", target)
    assert start.sha256 == read_card(eagle)["weights"]["sha256"]
    assert start.path == f"hub:me/x ({commit})", "a run's log says which one it was"
    with pytest.raises(UserError, match="was trained for another target"):
        resolve_drafter("hub:me/x", deep_target(seed=5))


def test_what_is_fetched_is_checked_as_on_any_disk(
    server: FakeHub, target: Any, eagle: Path
) -> None:
    weights = (eagle / "head.safetensors").read_bytes()
    turned = weights[:-1] + bytes([weights[-1] ^ 1])
    server.put("me/x", {**own(eagle), "head/head.safetensors": turned})
    with pytest.raises(UserError, match="damaged"):
        load_head(find_head("hub:me/x"), target)
    server.put("me/pickle", {"pytorch_model.bin": b"\x80\x04", "a.py": b"1"})
    with pytest.raises(UserError, match="a pickle is not fetched"):
        hub.served("hub:me/pickle")
    assert not [p for p in server.folder.rglob("*") if p.suffix in (".bin", ".py")]


WRONG = [
    ("hub:x", 0, "names no owner"),
    ("hub:me/x y", 0, "is no name of a repository"),
    ("hub:me/none", 0, "no such repository"),
    ("hub:me/x@v9", 0, "no such revision"),
    ("hub:me/engine", 0, "outrider import from=hub:me/engine"),
    ("hub:me/x", 0, "holds no head"),
    ("hub:me/x", 401, "the token is not valid"),
    ("hub:me/x", -1, "cannot be reached .*nobody is there.*HF_ENDPOINT"),
]


def test_what_goes_wrong_is_one_line_with_the_fix(server: FakeHub) -> None:
    server.put("me/x", {"a.json": b"{}"})
    server.put("me/engine", {"model.safetensors": b"0"})
    for name, status, said in WRONG:

        def refuse(call: str, status: int = status) -> None:
            if status:
                raise refusal(status) if status > 0 else ConnectionError("nobody is there")

        server.refuse = refuse
        forget()
        with pytest.raises(UserError, match=said) as raised:
            find_head(name)
        line = str(raised.value)
        assert line.startswith(f"drafters: {name}: ") and "\n" not in line


def test_a_head_of_another_target_is_refused_before_weights_are_fetched(
    server: FakeHub, eagle: Path, tmp_path: Path
) -> None:
    """By its card alone, and what the hub tells of the target's files."""
    server.put("me/x", own(eagle))
    files = {f"model-0000{n}-of-00002.safetensors": bytes([n]) * 9 for n in (1, 2)}
    server.put("org/t", {**files, "consolidated.safetensors": b"twice"})
    (tmp_path / "t").mkdir()
    for name, data in files.items():
        (tmp_path / "t" / name).write_bytes(data)
    other = TargetConfig(kind="hub", name="org/t")
    assert published_weights(other) == sha256_weights(tmp_path / "t")
    with pytest.raises(UserError, match="another target"):
        refuse_other(["none", "hub:me/x@tree"], other)
    assert not [*server.folder.rglob("*.safetensors")]
    refuse_other(["hub:me/x"], replace(other, allow_other=True))
    refuse_other(["hub:me/x"], TargetConfig(kind="hub", name="org/unknown"))
