"""Every conf/experiment composes; tests/scripts/test_served.py trains and exports what it names."""

from __future__ import annotations

from outrider.conf.schema import CONF, compose
from outrider.train.config import TrainConfig
from outrider.train.runs import keys_of
from outrider.train.validate import ValidateConfig, head_config

RECIPES = sorted(p.stem for p in (CONF / "experiment").glob("*.yaml"))
SCRIPTS = {"eagle": "eagle", "medusa": "medusa", "draft": "draft"}
SCRIPTS |= {"hydra": "hydra_heads", "demo": "eagle"}


def drawn_up(name: str) -> tuple[str, type[TrainConfig]]:
    """The script and the schema of a recipe."""
    script = next(script for word, script in SCRIPTS.items() if f"_{word}" in name)
    return script, keys_of(script)


def test_every_recipe_is_taken_by_its_script_and_by_validate() -> None:
    for name in RECIPES:
        given = [f"experiment={name}", "data.path=x", "out_dir=y"]
        cfg = compose(*drawn_up(name), given)
        again = compose("validate", ValidateConfig, given)
        assert head_config(again.head) == cfg.head and again.steps == cfg.steps, name
        on_gpus = not name.startswith("smollm2")
        assert cfg.micro_batch <= cfg.batch_size and cfg.eval.every <= (cfg.steps or 2000), name
        assert (cfg.steps == 0 < cfg.epochs) if on_gpus else cfg.steps > 0 == cfg.epochs, name
