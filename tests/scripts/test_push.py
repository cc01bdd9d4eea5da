"""scripts/push.py: what goes up, what its card says, and what is refused."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard

from outrider.heads.checkpoint import load_head, read_card, save_head
from outrider.heads.drafters import resolve_drafter
from outrider.heads.folders import find_head
from outrider.scripts import push
from outrider.scripts.common.files import ROOT
from outrider.scripts.export import main as export
from outrider.scripts.exporting.publication import scrubbed
from outrider.scripts.import_head import main as import_head
from tests.helpers.commands import code_of
from tests.helpers.hub import FakeHub, fake_hub, refusal
from tests.helpers.interop import DEEP, random_head

TARGET = ["target=tiny", *(f"target.{k}={v}" for k, v in DEEP.items()), "device=cpu"]
TOP = {"config.json", "expected.json", "model.safetensors", "outrider.json"}
OWN = {"README.md", "head/head.json", "head/head.safetensors"}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub(tmp_path, monkeypatch) as found:
        yield found


@pytest.fixture(scope="module")
def exported(target: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an EAGLE-3 head, its export for vLLM, and the prompts that it was checked
    on."""
    folder = tmp_path_factory.mktemp("work")
    seen = {"tokens_seen": 6192.0, "note": f"from {folder}/data.jsonl"}
    extra = {"step": 7, "training": seen}
    save_head(random_head(target, "eagle3", depth=5), folder / "run/head", target.identity, extra)
    start = {"event": "start", "data": f"9 rows of {folder}/chats.jsonl"}
    (folder / "run/metrics.jsonl").write_text(json.dumps(start) + "\n")
    (folder / "p.jsonl").write_text('{"prompt": "a slow horse"}\n{"prompt": "go"}\n')
    words = [f"drafter={folder / 'run'}", "format=vllm", f"out={folder / 'run/export'}"]
    ended(export, [*TARGET, *words, f"prompts={folder / 'p.jsonl'}"])
    return folder


@pytest.fixture
def place(exported: Path, tmp_path: Path) -> Path:
    """A run of its own for a test, exported already."""
    shutil.copytree(exported / "run", tmp_path / "run")
    return tmp_path / "run"


def ended(verb: Any, words: list[str], code: int = 0) -> None:
    assert code_of(verb, *words) == code


def run(folder: Path | str, repository: str, *words: str, code: int = 0) -> None:
    ended(push.command, [str(folder), repository, "license=apache-2.0", *words], code)


def test_what_goes_up_comes_back(
    server: FakeHub, target: Any, place: Path, tmp_path: Path, capsys: Any
) -> None:
    run(place, "me/x", f"export={place}/export")
    assert "drafter: hub:me/x\n" in capsys.readouterr().out
    files = server.held("me/x")
    assert set(files) - {".gitattributes"} == TOP | OWN
    assert server.calls.count("create_commit") == 1, "all of it at once"
    mine = load_head(find_head(str(place)), target).state_dict()
    theirs = load_head(find_head("hub:me/x"), target).state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
    manifest = json.loads(files["outrider.json"])
    assert set(manifest["files"]) == TOP - {"outrider.json"}
    for name, said in manifest["files"].items():
        assert hashlib.sha256(files[name]).hexdigest() == said["sha256"], name
    # The engine's own form is read as any published head is.
    ended(import_head, ["from=hub:me/x", f"out={tmp_path / 'imported'}", "probe=false", *TARGET])
    again = load_head(tmp_path / "imported", target).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in mine.items())
    said = read_card(tmp_path / "imported")["extra"]["imported"]
    assert said["from"] == "hub:me/x" and said["commit"] in server.repositories["me/x"].commits


def test_no_text_names_a_folder_of_this_machine(
    server: FakeHub, place: Path, exported: Path
) -> None:
    run(place, "me/x", f"export={place}/export")
    for name, data in server.held("me/x").items():
        if name.endswith((".json", ".md")):
            for own in (exported, place, ROOT, Path.home(), Path(sys.prefix), exported.parent):
                assert str(own) not in data.decode(), (name, own)
    assert b"9 rows of chats.jsonl" in server.held("me/x")["README.md"]


def test_paths_are_told_from_what_looks_like_one() -> None:
    for text, wanted in (
        ("read from /tmp/a/b.jsonl, twice", "read from b.jsonl, twice"),
        ('{"model": "/tmp/run/export", "k": 1}', '{"model": "me/x", "k": 1}'),
        ("https://example.org/tmp/a and a/b/c", "https://example.org/tmp/a and a/b/c"),
        ("1/2/3 of /no-such-folder/x", "1/2/3 of /no-such-folder/x"),
    ):
        assert scrubbed(text, {"/tmp/run/export": "me/x", "": "nothing"}) == wanted


def test_the_card_says_what_is_known(server: FakeHub, place: Path, target: Any) -> None:
    words = ["base_model=org/tiny", "datasets=[org/chats]"]
    run(place, "me/x", f"export={place}/export", *words)
    text = server.held("me/x")["README.md"].decode()
    about = ModelCard(text).data
    assert about.license == "apache-2.0" and about.base_model == "org/tiny"
    assert about.library_name == "outrider" and about.datasets == ["org/chats"]
    assert about.tags == ["speculative-decoding", "eagle3", "vllm"] and "not measured\n" in text
    assert "| K as trained | 3 |" in text, "three steps, although drafts have five levels"
    assert '"model": "me/x", "method": "eagle3", "num_speculative_tokens": 3' in text
    best = {"best": {"accepted_length": 2.345, "step": 7}}
    save_head(random_head(target, "eagle3"), place / "head", target.identity, best)
    run(place, "me/x")
    assert (
        "accepted length 2.35 (bonus token counted, step 7)"
        in server.held("me/x")["README.md"].decode()
    )


def test_a_second_push_replaces_the_first_and_nothing_else(
    server: FakeHub, place: Path, target: Any
) -> None:
    run(place, "me/x", f"export={place}/export")
    server.put("me/x", {"LICENSE": b"mine", "photo.png": b"png"})
    shutil.rmtree(place / "head")
    save_head(random_head(target, "eagle3", seed=9), place / "head", target.identity, {"step": 8})
    run(place, "me/x")
    assert set(server.held("me/x")) == OWN | {"LICENSE", "photo.png", ".gitattributes"}
    weights = read_card(find_head("hub:me/x"))["weights"]["sha256"]
    assert weights == read_card(place / "head")["weights"]["sha256"]


REFUSED = {
    "no owner": ["x", "", "repository: x: is no name of a repository; write OWNER/x"],
    "another export": ["me/x", "export=head", "export: .* no export of this head"],
    "may not write": ["me/x", "403", "repository: me/x: the token may not do this"],
    "somebody was faster": ["me/x", "412", "repository: me/x: somebody else has pushed"],
    "somebody's model": ["me/m", "", "repository: me/m holds files that no push wrote"],
    "public": ["me/m", "private=true", "private: me/m is there and public"],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_one_line_and_leaves_nothing(
    server: FakeHub, place: Path, name: str, capsys: Any
) -> None:
    repository, what, said = REFUSED[name]
    server.put("me/m", {"config.json": b"{}", "model.safetensors": b"a model"})
    before = dict(server.held("me/m"))

    def refuse(call: str) -> None:
        if what.isdigit() and call == "create_commit":
            raise refusal(int(what))

    server.refuse = refuse
    words = [what.replace("=head", f"={place}/head")] if "=" in what else []
    run(place, repository, *words, code=2)
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert told.startswith("error: ") and re.search(said, told), told
    assert server.held("me/m") == before
    assert "me/x" not in server.repositories or set(server.held("me/x")) == {".gitattributes"}
    if repository == "me/m" and not words:
        run(place, "me/m", "overwrite=true")


def test_a_damaged_head_does_not_go_up(server: FakeHub, place: Path, capsys: Any) -> None:
    for path in (place / "export/model.safetensors", place / "head/head.safetensors"):
        path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
        run(place, "me/x", f"export={place}/export", code=2)
        assert path.name in capsys.readouterr().err
    assert not server.repositories


def test_a_branch_and_a_private_repository_are_kept_to(
    server: FakeHub, target: Any, tmp_path: Path
) -> None:
    save_head(random_head(target, "medusa"), tmp_path / "run/best", target.identity, {})
    run(tmp_path / "run", "team/x", "private=true", "revision=v1")
    assert server.repositories["team/x"].private and not set(server.held("team/x")) & OWN
    assert resolve_drafter("hub:team/x@v1@chain", target).max_depth == 3
