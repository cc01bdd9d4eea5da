"""scripts/push.py by the real client, to a stand-in of the hub on loopback: what goes up, what its
card says, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import constants

from outrider.heads import find_head, load_head, save_head
from outrider.heads.checkpoint import read_card
from outrider.heads.drafters import resolve_drafter
from outrider.scripts import push
from outrider.scripts.common.files import ROOT
from outrider.scripts.evaluate import main as evaluate
from outrider.scripts.import_head import main as import_head
from outrider.scripts.publishing.places import without_places
from tests.helpers.hub import at, forget, held, hub_on_loopback, put
from tests.helpers.hub_stand_in import HubStandIn
from tests.helpers.interop import DEEP, deep_target, random_head

TARGET = ["target=tiny", *(f"target.{k}={v}" for k, v in DEEP.items()), "device=cpu"]
TOP = {"README.md", "config.json", "expected.json", "model.safetensors", "outrider.json"}
OWN = {"head/head.json", "head/head.safetensors"}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    with hub_on_loopback(tmp_path, monkeypatch) as found:
        yield found


@pytest.fixture(scope="module")
def target() -> Any:
    return deep_target()


@pytest.fixture(scope="module")
def exported(target: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an EAGLE-3 head, its export for vLLM, and the prompts that it was checked on."""
    folder = tmp_path_factory.mktemp("work")
    seen = {"tokens_seen": 6192.0, "note": f"from {folder}/data.jsonl"}
    extra = {"step": 7, "training": seen}
    save_head(random_head(target, "eagle3", depth=5), folder / "run/head", target.identity, extra)
    start = {"event": "start", "data": f"9 rows of {folder}/chats.jsonl"}
    (folder / "run/metrics.jsonl").write_text(json.dumps(start) + "\n")
    (folder / "p.jsonl").write_text('{"prompt": "a slow horse"}\n{"prompt": "go"}\n')
    with pytest.MonkeyPatch.context() as patch, hub_on_loopback(folder, patch):
        assert run(folder / "run", "me/x", f"prompts={folder / 'p.jsonl'}") == 0
    return folder


@pytest.fixture
def place(exported: Path, tmp_path: Path) -> Path:
    """A run of its own for a test, exported already."""
    shutil.copytree(exported / "run", tmp_path / "run")
    return tmp_path / "run"


def run(folder: Path | str, repository: str, *words: str, license: str = "apache-2.0") -> int:
    given = [f"license={license}"] if license else []
    with pytest.raises(SystemExit) as stop:
        push.command([str(folder), repository, *TARGET, *given, *words])
    return int(stop.value.code or 0)


def report(place: Path, weights: str, target: Any, rows: list[tuple[str, int, float]]) -> Path:
    """A report.json of evaluate, as far as a card reads it."""
    drafters = [
        {
            "name": "run",
            "shape": shape,
            "max_depth": size,
            "max_nodes": size,
            "weights_sha256": [weights],
            "accepted_length": {"mean": mean, "low": mean - 0.1, "high": mean + 0.1},
        }
        for shape, size, mean in rows
    ]
    settings = {
        "prompts": {"path": f"{place}/asked.jsonl", "sha256": "ab" * 32},
        "num_prompts": 72,
        "temperature": 0.0,
        "max_new_tokens": 128,
        "dtype": "bfloat16",
        "batch_size": 1,
    }
    identity = {"weights_sha256": target.identity.weights_sha256}
    place.mkdir()
    (place / "report.json").write_text(
        json.dumps({"target": identity, "settings": settings, "drafters": drafters})
    )
    return place


def metadata(page: bytes) -> dict[str, Any]:
    return yaml.safe_load(page.decode().split("---\n")[1])


def test_what_goes_up_comes_back(
    server: HubStandIn, target: Any, place: Path, tmp_path: Path, capsys: Any
) -> None:
    assert run(place, "me/x") == 0
    out = capsys.readouterr().out
    assert "export-vllm is of this head" in out and "drafter: hub:me/x\n" in out
    files = held(server, "me/x")
    assert set(files) - {".gitattributes"} == TOP | OWN
    commits = server.store.read("me/x")["commits"]
    assert len(commits) == 2, "the repository's first one, and one with everything"
    mine = load_head(find_head(str(place)), target)
    theirs = load_head(find_head("hub:me/x"), target)
    for name, value in mine.state_dict().items():
        assert torch.equal(value, theirs.state_dict()[name]), name
    assert resolve_drafter("hub:me/x@tree", target).max_nodes > 1
    # The engine's own form is read as any published head is.
    words = ["from=hub:me/x", f"out={tmp_path / 'imported'}", "probe=false", *TARGET]
    with pytest.raises(SystemExit) as stop:
        import_head(words)
    assert not stop.value.code
    again = load_head(tmp_path / "imported", target).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in mine.state_dict().items())
    said = read_card(tmp_path / "imported")["extra"]["imported"]
    assert said["from"] == "hub:me/x" and said["commit"] == list(commits)[-1]


def test_the_manifest_has_the_hash_of_every_file(server: HubStandIn, place: Path) -> None:
    assert run(place, "me/x") == 0
    files = held(server, "me/x")
    manifest = json.loads(files["outrider.json"])
    assert set(manifest["files"]) == TOP - {"outrider.json"}
    for name, said in manifest["files"].items():
        assert hashlib.sha256(files[name]).hexdigest() == said["sha256"], name
    card = json.loads(files["head/head.json"])
    assert manifest["source"]["card_sha256"] == card["sha256"]


def test_no_text_names_a_folder_of_this_machine(
    server: HubStandIn, place: Path, exported: Path
) -> None:
    assert run(place, "me/x", f"prompts={exported / 'p.jsonl'}") == 0
    for name, data in held(server, "me/x").items():
        if name.endswith((".json", ".md")):
            text = data.decode()
            for own in (exported, place, ROOT, Path.home(), Path(sys.prefix)):
                assert str(own) not in text, (name, own)
            assert str(exported.parent) not in text
    assert "9 rows of chats.jsonl" in held(server, "me/x")["README.md"].decode()


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("read from /tmp/a/b.jsonl, twice", "read from b.jsonl, twice"),
        ('{"model": "/tmp/run/export", "k": 1}', '{"model": "me/x", "k": 1}'),
        ("https://example.org/tmp/a and a/b/c", "https://example.org/tmp/a and a/b/c"),
        ("1/2/3 of /no-such-folder/x", "1/2/3 of /no-such-folder/x"),
    ],
)
def test_paths_are_told_from_what_looks_like_one(text: str, wanted: str) -> None:
    assert without_places(text, {"/tmp/run/export": "me/x", "": "nothing"}) == wanted


def test_the_card_says_what_was_measured_and_how(
    server: HubStandIn, place: Path, target: Any, tmp_path: Path
) -> None:
    weights = read_card(place / "head")["weights"]["sha256"]
    rows = [("tree", 16, 2.5), ("chain", 3, 2.25)]
    made = report(tmp_path / "reports", weights, target, rows)
    words = ["base_model=org/tiny", "datasets=[org/chats]", f"report={made}"]
    assert run(place, "me/x", *words) == 0
    page = held(server, "me/x")["README.md"]
    about = metadata(page)
    assert about["license"] == "apache-2.0" and about["base_model"] == "org/tiny"
    assert about["library_name"] == "outrider" and about["pipeline_tag"] == "text-generation"
    assert about["datasets"] == ["org/chats"]
    assert about["tags"] == ["speculative-decoding", "eagle3", "vllm"]
    (result,) = about["model-index"][0]["results"]
    assert result["metrics"][0]["value"] == 2.25, "engines draft chains"
    text = page.decode()
    assert "| chain of 3 | 2.25 | 2.15 to 2.35 |" in text
    assert "| tree of 16 nodes | 2.50 | 2.40 to 2.60 |" in text
    assert "72 prompts of asked.jsonl (sha256 abababababab); greedy; at most 128" in text
    assert "| K as trained | 3 |" in text, "three steps, although drafts have five levels"
    assert '"model": "me/x", "method": "eagle3", "num_speculative_tokens": 3' in text
    assert "vllm serve org/tiny --spec" in text, "also where the export knew no name"
    assert "never its answers" not in text and "lossless" not in text


def test_an_evaluation_of_what_was_pushed_is_what_the_next_card_says(
    server: HubStandIn, place: Path, exported: Path, tmp_path: Path
) -> None:
    """From evaluate's own report, of the head on the hub, whose commit it names."""
    assert run(place, "me/x") == 0
    words = [*TARGET, "drafters=[none,hub:me/x@chain]", f"prompts={exported / 'p.jsonl'}"]
    words += [f"out={tmp_path / 'reports'}", "max_new_tokens=24", "parity=0", "quiet=true"]
    with pytest.raises(SystemExit) as stop:
        evaluate([*words, "dtype=float32"])
    assert not stop.value.code
    row = json.loads((tmp_path / "reports/report.json").read_text())["drafters"][1]
    assert row["hub"] == {"hub:me/x": server.store.read("me/x")["refs"]["main"]}
    assert run(place, "me/x", f"report={tmp_path / 'reports'}") == 0
    length = row["accepted_length"]
    text = held(server, "me/x")["README.md"].decode()
    shown = [f"{length[key]:.2f}" for key in ("mean", "low", "high")]
    assert f"| chain of 5 | {shown[0]} | {shown[1]} to {shown[2]} |" in text
    assert "2 prompts of p.jsonl" in text and "float32, 1 at a time" in text


def test_a_card_without_an_evaluation_says_so(server: HubStandIn, place: Path) -> None:
    assert run(place, "me/x") == 0
    page = held(server, "me/x")["README.md"].decode()
    assert "## Accepted length\n\nnot measured\n" in page and "model-index" not in page
    assert "base_model" not in metadata(page.encode())


def test_the_licence_is_the_base_models_where_the_hub_knows_it(
    server: HubStandIn, place: Path, capsys: Any
) -> None:
    put(server, "org/tiny", {"README.md": b"---\nlicense: gemma\n---\n"})
    assert run(place, "me/x", "base_model=org/tiny", license="") == 0
    assert metadata(held(server, "me/x")["README.md"])["license"] == "gemma"
    assert "license: gemma, as that of org/tiny" in capsys.readouterr().out


@pytest.mark.parametrize("kind, depth", [("hydra_heads", 2), ("medusa", 3)])
def test_a_head_without_an_engine_goes_up_alone(
    server: HubStandIn, target: Any, tmp_path: Path, kind: str, depth: int, capsys: Any
) -> None:
    """No engine ever read Hydra heads, and the newest vLLM reads no Medusa heads any more."""
    save_head(random_head(target, kind), tmp_path / "run/best", target.identity, {})
    assert run(tmp_path / "run", "team/x", "private=true", "revision=v1") == 0
    assert set(held(server, "team/x", "v1")) - {".gitattributes"} == OWN | {
        "README.md",
        "outrider.json",
    }
    assert server.store.read("team/x")["private"]
    assert resolve_drafter("hub:team/x@v1@chain", target).max_depth == depth
    page = held(server, "team/x", "v1")["README.md"].decode()
    assert "In an engine" not in page and f"| K as trained | {depth} |" in page
    assert f"reads no {kind} heads; it goes up in our own form" in capsys.readouterr().out


def test_an_export_goes_up_alone(server: HubStandIn, place: Path) -> None:
    assert run(place / "export-vllm", "me/x") == 0
    assert set(held(server, "me/x")) - {".gitattributes"} == TOP


def test_a_second_push_replaces_the_first_and_nothing_else(
    server: HubStandIn, place: Path, target: Any
) -> None:
    assert run(place, "me/x") == 0
    put(server, "me/x", {"LICENSE": b"mine", "photo.png": b"png"})
    other = random_head(target, "eagle3", seed=9)
    shutil.rmtree(place / "head")
    save_head(other, place / "head", target.identity, {"step": 8})
    assert run(place, "me/x", "format=none") == 0
    files = held(server, "me/x")
    assert set(files) == OWN | {"README.md", "outrider.json", "LICENSE", "photo.png"} | {
        ".gitattributes"
    }
    weights = read_card(find_head("hub:me/x"))["weights"]["sha256"]
    assert weights == read_card(place / "head")["weights"]["sha256"]


def test_out_writes_what_would_go_up_and_asks_nobody(
    server: HubStandIn, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "")
    assert run(place, "me/x", f"out={tmp_path / 'form'}") == 0
    found = {str(p.relative_to(tmp_path / "form")) for p in (tmp_path / "form").rglob("*.*")}
    assert found == TOP | OWN and not server.requests


REFUSED = {
    "no token": ("", "me/x", [], "repository: no token is set; `hf auth login`, or set HF_TOKEN"),
    "token that reads": ("read-me", "me/x", [], "the token of me may read only; set HF_TOKEN"),
    "token that is none": ("bad", "me/x", [], "repository: me/x: the token is not valid"),
    "another's name": ("write-me", "you/x", [], "who may write under me, team; write one of"),
    "no owner": ("write-me", "x", [], "repository: x: is no name of a repository; write OWNER/x"),
    "no licence": ("write-me", "me/x", ["license="], "license: is empty.*set license=apache-2.0"),
    "no run": ("write-me", "me/x", ["run=nowhere"], "run: nowhere: neither none, ngram nor an"),
    "no report": ("write-me", "me/x", ["report=/nowhere"], "report: /nowhere: No such file"),
    "not for the engine": (
        "write-me",
        "me/x",
        ["format=medusa"],
        "format=medusa: it has no layout",
    ),
    "two keys at odds": ("write-me", "me/x", ["format=none", "export=a"], "export: is for an eng"),
    "wrong target": ("write-me", "me/x", ["target.seed=3", "format=sglang"], "for another target"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_one_line_and_leaves_nothing(
    server: HubStandIn, place: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    token, repository, words, said = REFUSED[name]
    monkeypatch.setenv("HF_TOKEN", token)
    folder = next((w.removeprefix("run=") for w in words if w.startswith("run=")), str(place))
    words = [w for w in words if not w.startswith("run=")]
    license = "" if "license=" in words else "mit"
    words = [w for w in words if w != "license="]
    assert run(folder, repository, *words, license=license) == 2
    told = capsys.readouterr().err.strip().splitlines()[-1]
    import re

    assert told.startswith("error: ") and re.search(said, told), told
    assert not list((server.store.folder).glob("*/*.json"))
    assert not list(place.glob(".*")) and not list(place.glob("export-sglang"))


def test_offline_and_without_a_network_are_said(
    server: HubStandIn, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert run(place, "me/x") == 2
    assert "repository: HF_HUB_OFFLINE is set; unset it to push" in capsys.readouterr().err
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    at("http://127.0.0.1:9", monkeypatch)
    assert run(place, "me/x") == 2
    assert "repository: me/x: cannot be reached" in capsys.readouterr().err


def test_a_repository_of_somebodys_model_is_not_overwritten(
    server: HubStandIn, place: Path, capsys: Any
) -> None:
    put(server, "me/model", {"config.json": b"{}", "model.safetensors": b"a model"})
    assert run(place, "me/model") == 2
    said = "repository: me/model holds files that no push wrote (config.json, model.safetensors)"
    assert said in capsys.readouterr().err
    assert held(server, "me/model")["model.safetensors"] == b"a model"
    assert run(place, "me/model", "private=true") == 2
    assert "private: me/model is there and public" in capsys.readouterr().err
    assert run(place, "me/model", "overwrite=true") == 0


def test_a_damaged_head_and_another_heads_report_do_not_go_up(
    server: HubStandIn, place: Path, target: Any, tmp_path: Path, capsys: Any
) -> None:
    other = report(tmp_path / "reports", "0" * 64, target, [("chain", 3, 2.0)])
    assert run(place, "me/x", f"report={other}") == 2
    assert "measured no head with these weights" in capsys.readouterr().err
    path = place / "head/head.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    assert run(place, "me/x") == 2
    assert "head.safetensors: damaged" in capsys.readouterr().err
    assert server.store.read("me/x") is None


def test_a_refused_file_is_told_with_the_hubs_answer(
    server: HubStandIn, place: Path, capsys: Any
) -> None:
    server.fault = lambda method, path: 507 if method == "PUT" else 0
    assert run(place, "me/x") == 2
    assert "repository: me/x: the hub answered 507" in capsys.readouterr().err
    assert set(held(server, "me/x")) == {".gitattributes"}


@pytest.mark.parametrize("status, said", [(403, "may not do this"), (412, "somebody else has")])
def test_a_refused_commit_leaves_the_old_one_and_goes_on(
    server: HubStandIn, place: Path, target: Any, status: int, said: str, capsys: Any
) -> None:
    assert run(place, "me/x", "format=none") == 0
    before = held(server, "me/x")
    server.fault = lambda method, path: status if "/commit/" in path else 0
    assert run(place, "me/x") == 2
    assert (
        f"repository: me/x: {'the token ' if status == 403 else ''}{said}"
        in capsys.readouterr().err
    )
    assert held(server, "me/x") == before
    del server.fault
    server.requests.clear()
    assert run(place, "me/x") == 0
    assert not [line for line in server.requests if line.startswith("PUT")], "sent once already"
    forget()
    assert set(held(server, "me/x")) >= TOP | OWN


def test_a_push_that_is_killed_leaves_the_old_commit_and_goes_on(
    server: HubStandIn, place: Path
) -> None:
    """The process dies while the hub has the files and not yet the commit."""
    assert run(place, "me/x", "format=none") == 0
    before, reached, over = held(server, "me/x"), threading.Event(), threading.Event()

    def hold(method: str, path: str) -> int:
        if "/commit/" not in path:
            return 0
        reached.set()
        over.wait(60)
        return -1

    server.fault = hold
    words = ["scripts/push.py", str(place), "me/x", *TARGET, "license=mit"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, *words], env=env, cwd=ROOT)
    try:
        assert reached.wait(60)
        process.send_signal(signal.SIGKILL)
        process.wait()
    finally:
        process.kill()
        over.set()
    assert held(server, "me/x") == before
    del server.fault
    server.requests.clear()
    assert run(place, "me/x") == 0
    assert not [line for line in server.requests if line.startswith("PUT")]
    assert set(held(server, "me/x")) >= TOP | OWN
