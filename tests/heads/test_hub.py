"""hub:OWNER/NAME wherever a head may stand, fetched by the real client from a stand-in on
loopback."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.conf.errors import UserError
from outrider.conf.schema import compose
from outrider.heads import find_head, head_class, head_in, hub, load_head, save_head
from outrider.heads.checkpoint import read_card
from outrider.heads.drafters import resolve_drafter
from outrider.heads.folders import is_plain
from outrider.heads.names import parse
from outrider.heads.warm import Start
from outrider.train.loop import fit
from outrider.train.runs import EagleRun
from tests.helpers.chats import chats
from tests.helpers.hub import at, forget, hub_on_loopback, put
from tests.helpers.hub_stand_in import HubStandIn
from tests.helpers.interop import DEEP, deep_target, random_head


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    with hub_on_loopback(tmp_path, monkeypatch) as found:
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


@pytest.mark.parametrize(
    "name, source, options",
    [
        ("hub:me/x", "hub:me/x", ("", None, None)),
        ("hub:me/x@tree", "hub:me/x", ("tree", None, None)),
        ("hub:me/x@v1", "hub:me/x@v1", ("", None, None)),
        ("hub:me/x@refs/pr/1@chain:4", "hub:me/x@refs/pr/1", ("chain", 4, None)),
        ("hub:me/x-1.5@v1.0@tree:16@adaptive", "hub:me/x-1.5@v1.0", ("tree", None, 16)),
    ],
)
def test_a_name_has_a_repository_a_revision_and_a_shape(
    name: str, source: str, options: tuple[Any, ...]
) -> None:
    draft = parse(name)
    assert draft.source == source and str(draft) == name
    assert (draft.shape, draft.depth, draft.nodes) == options
    joined = parse(f"{name.partition('@adaptive')[0]}+ngram@tree")
    assert [part.source for part in joined.each] == [source, "ngram"]


@pytest.mark.parametrize("name", ["hub:me/x@tre:4", "hub:me/x@v1@tre", "hub:me/x@", "hub:me/x@v@w"])
def test_a_slip_behind_a_revision_is_no_revision(name: str) -> None:
    with pytest.raises(UserError, match="unknown shape"):
        parse(name)


def test_a_head_is_fetched_once_and_is_the_one_that_was_put(
    server: HubStandIn, target: Any, eagle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit = put(server, "me/x", {**own(eagle), "config.json": b"{}", "model.safetensors": b"big"})
    capsys.readouterr()
    folder = find_head("hub:me/x")
    said = capsys.readouterr().err
    assert re.fullmatch(f"hub:me/x: fetching 69.. kB at commit {commit[:7]}\n", said)
    assert sorted(p.name for p in folder.iterdir()) == ["head.json", "head.safetensors"]
    assert not list(folder.parent.glob("*.safetensors")), "the engine's files are not wanted here"
    mine, theirs = (load_head(one, target).state_dict() for one in (eagle, folder))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine | theirs)
    assert hub.commits("hub:me/x@tree+ngram@tree") == {"hub:me/x": commit}
    asked = len(server.requests)
    assert head_in("hub:me/x") == folder and len(server.requests) == asked
    forget()
    assert find_head("hub:me/x") == folder and not capsys.readouterr().err


def test_every_way_to_name_a_head_takes_one_of_the_hub(
    server: HubStandIn, target: Any, eagle: Path
) -> None:
    commit = put(server, "me/x", own(eagle))
    assert not is_plain("hub:me/x")
    drafter = resolve_drafter("hub:me/x@chain:2", target)
    assert drafter.name == "hub:me/x@chain:2" and drafter.max_depth == 2
    start = Start("hub:me/x", "eagle3", target)
    assert start.sha256 == read_card(eagle)["weights"]["sha256"]
    assert start.path == f"hub:me/x ({commit})", "a run's log says which one it was"
    assert hub.origin("hub:me/x") == {"path": "hub:me/x", "commit": commit}
    assert hub.origin(str(eagle)) == {"path": str(eagle)}


def test_a_run_that_starts_from_the_hub_records_the_commit(
    server: HubStandIn, eagle: Path, tmp_path: Path
) -> None:
    commit = put(server, "me/x", own(eagle))
    data = chats(tmp_path / "data.jsonl")
    words = ["target=tiny", *(f"target.{k}={v}" for k, v in DEEP.items()), "start=hub:me/x"]
    words += [f"data.path={data}", f"out_dir={tmp_path / 'run'}", "data.held_out=0.1", "steps=2"]
    words += ["data.cache=false", "batch_size=4", "dtype=float32", "device=cpu"]
    words += ["head.draft_vocab=64", "eval.every=0", "eval.parity=0"]
    fit(compose("eagle", EagleRun, words), head_class("eagle3"))
    first = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])
    assert first["start"] == f"hub:me/x ({commit})"


def test_without_a_network_the_cache_is_taken_and_it_is_said(
    server: HubStandIn,
    eagle: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    put(server, "me/x", own(eagle))
    folder = find_head("hub:me/x")
    forget()
    capsys.readouterr()
    at("http://127.0.0.1:9", monkeypatch)
    assert find_head("hub:me/x") == folder
    assert "note: hub:me/x: the hub does not answer" in capsys.readouterr().err
    with pytest.raises(UserError, match="hub:me/y: cannot be reached .*HF_ENDPOINT"):
        find_head("hub:me/y")


def test_a_pickle_is_not_fetched(server: HubStandIn, tmp_path: Path) -> None:
    put(server, "me/x", {"pytorch_model.bin": b"\x80\x04", "config.json": b"{}", "a.py": b"1"})
    for fetch in (hub.head, hub.served):
        with pytest.raises(UserError, match=r"pickle alone \(pytorch_model.bin\).*hf download me"):
            fetch("hub:me/x")
    assert not [p for p in (tmp_path / "home").rglob("*") if p.suffix in (".bin", ".py")]
    assert not [line for line in server.requests if "resolve" in line and ".bin" in line]


def test_what_is_fetched_is_checked_as_on_any_disk(
    server: HubStandIn, target: Any, eagle: Path
) -> None:
    weights = (eagle / "head.safetensors").read_bytes()
    turned = weights[:-1] + bytes([weights[-1] ^ 1])
    put(server, "me/x", {**own(eagle), "head/head.safetensors": turned})
    with pytest.raises(UserError, match="damaged"):
        load_head(find_head("hub:me/x"), target)
    put(server, "me/odd", {**own(eagle), "head/-rf.json": b"{}"})
    with pytest.raises(UserError, match="odd name 'head/-rf.json'"):
        find_head("hub:me/odd")


def test_a_head_of_another_target_is_refused(server: HubStandIn, eagle: Path) -> None:
    put(server, "me/x", own(eagle))
    with pytest.raises(UserError, match="was trained for another target.*use the target it names"):
        resolve_drafter("hub:me/x", deep_target(seed=5))


@pytest.mark.parametrize(
    "name, token, said",
    [
        ("hub:x", "write-me", "names no owner; write hub:OWNER/x"),
        ("hub:me/x y", "write-me", "is no name of a repository; write hub:OWNER/NAME"),
        ("hub:me/none", "write-me", "no such repository, or a private one .*; check it$"),
        ("hub:me/none", "", "no such repository.*no token is set: `hf auth login`, or HF_TOKEN"),
        ("hub:me/secret", "read-you", "no such repository, or a private one"),
        ("hub:me/secret", "bad", "the token is not valid; set HF_TOKEN to another one"),
        ("hub:me/x@v9", "write-me", "no revision 'v9'; give a branch, tag or commit"),
        ("hub:me/x@tre", "write-me", "no revision 'tre'; did you mean @tree[?] or give"),
        ("hub:me/engine", "write-me", "outrider import from=hub:me/engine .*name it me/engine"),
        ("hub:me/secret", "write-me", r"holds no head \(head/head.json\); give another"),
    ],
)
def test_what_goes_wrong_is_one_line_with_the_fix(
    server: HubStandIn, monkeypatch: pytest.MonkeyPatch, name: str, token: str, said: str
) -> None:
    put(server, "me/x", {"a.json": b"{}"})
    put(server, "me/engine", {"model.safetensors": b"0"})
    put(server, "me/secret", {"a.json": b"{}"}, private=True)
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(UserError, match=said) as raised:
        find_head(name)
    assert str(raised.value).startswith(f"drafters: {name}: ") and "\n" not in str(raised.value)
