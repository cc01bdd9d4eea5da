"""EAGLE-3 heads in the format of the speculators package: one folder that `vllm serve FOLDER`
takes as the model.

The folder names its target (verifier), carries the target's embedding, and lists the inner
layers always, counted as hidden_states[k]. norm_before_residual is written out: vLLM takes
true when it is absent.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from outrider.conf.errors import UserError
from outrider.decode.target import Target
from outrider.heads.base import Head
from outrider.heads.config import MOST_DEPTH
from outrider.heads.eagle.head import Eagle3Head
from outrider.heads.interop import engines
from outrider.heads.interop.eagle3 import NORMS, Eagle3Vllm
from outrider.heads.interop.layout import Facts
from outrider.heads.interop.llama import fields, window
from outrider.heads.interop.reading import Foreign

VERSION = "0.9.0"


class Speculators(Eagle3Vllm):
    """speculators_model_type eagle3."""

    format, engine = "speculators", engines.SPECULATORS
    prefix: ClassVar[str] = "layers.0."
    embeds: ClassVar[bool] = True

    def needs(self, head: Eagle3Head) -> list[str]:
        """See HeadLayout."""
        return ["embed_tokens.weight [V, D]"]

    def refusals(self, head: Eagle3Head, facts: Facts) -> list[str]:
        """See HeadLayout."""
        return super().refusals(head, facts) + nameless(facts)

    def config(self, head: Eagle3Head, facts: Facts, dtype: str) -> dict[str, Any]:
        """See HeadLayout."""
        parallel = head.cfg.parallel
        return {
            "architectures": ["PEagleSpeculator" if parallel else "Eagle3Speculator"],
            **about("peagle" if parallel else "eagle3", facts, head.cfg.depth),
            **({"mask_token_id": head.cfg.mask_token} if parallel else {}),
            "transformer_layer_config": {
                **fields(head.config_json()["layer"], facts, dtype),
                **window(head.cfg.sliding_window, head.cfg.layers),
            },
            "draft_vocab_size": head.cfg.draft_vocab or facts.vocab,
            "target_hidden_size": facts.hidden,
            "eagle_aux_hidden_state_layer_ids": list(head.taps),
            **{theirs: getattr(head.cfg, ours) for ours, theirs in NORMS.items()},
            "torch_dtype": dtype,
        }

    def described(self, foreign: Foreign) -> dict[str, Any]:
        """See Eagle3Vllm."""
        return inner(foreign, ("llama",))

    def read(self, foreign: Foreign, target: Target) -> Head:
        """See HeadLayout."""
        head = super().read(foreign, target)
        depth = first(
            foreign.config, "speculators_config", "proposal_methods", 0, "speculative_tokens"
        )
        if type(depth) is int and 0 < depth <= MOST_DEPTH:
            head.cfg = replace(head.cfg, depth=depth)
        return head


def nameless(facts: Facts) -> list[str]:
    """Why a folder cannot name its target."""
    if facts.name:
        return []
    return [
        "verifier: the folder must name its target, and this one has no files; the nearest that "
        "works: verifier=FOLDER_OR_REPOSITORY, or format=vllm"
    ]


def about(algorithm: str, facts: Facts, depth: int) -> dict[str, Any]:
    """Keys of every folder: what it holds, how many tokens to draft, for which target."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": depth,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "speculators_model_type": algorithm,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": algorithm,
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": facts.name, "architectures": [facts.architecture]},
        },
    }


def inner(foreign: Foreign, kinds: tuple[str, ...]) -> dict[str, Any]:
    """transformer_layer_config. Raises UserError when it is missing or of another kind."""
    where, found = foreign.folder / "config.json", foreign.config.get("transformer_layer_config")
    if not isinstance(found, dict):
        raise UserError(f"{where}: transformer_layer_config is missing; export the head again")
    if found.get("model_type", kinds[0]) not in kinds:
        raise UserError(
            f"{where}: its layer is a {found['model_type']} layer; {kinds[0].capitalize()} layers "
            "are read"
        )
    return found


def first(value: Any, *path: str | int) -> Any:
    """What lies at a path of keys and places, None where it leads nowhere."""
    for step in path:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return None
    return value
