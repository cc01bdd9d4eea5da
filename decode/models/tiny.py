"""A target from configuration alone: a small random language model of any stock architecture
and a byte tokenizer. No files, no network. `target=tiny` and the tests use it; the distribution of
such a model is arbitrary but fixed by the seed, which is all that losslessness needs."""

from __future__ import annotations

from typing import Any

import torch

from outrider.conf.errors import UserError
from outrider.decode.models.config import MIN_VOCAB

END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"  # ids 0, 1, 2
FIRST_BYTE = 3  # ids 3..258 are the 256 bytes; further ones are reserved words

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer(vocab: int = MIN_VOCAB, template: str = CHATML) -> Any:
    """Return a real PreTrainedTokenizerFast with one token for each byte: lossless on any
    text, no BOS, ChatML template.

    Ids: 0 end of text (and padding), 1 start of turn, 2 end of turn (EOS), 3 + b = byte b,
    from 259 on reserved words that no text encodes to. vocab: at least 260."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [END, START, STOP, *byte_letters()]
    words += [f"<|reserved_{i}|>" for i in range(len(words), vocab)]
    core = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(
        [AddedToken(w, special=True, normalized=False) for w in (END, START, STOP)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=STOP,
        pad_token=END,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def byte_letters() -> list[str]:
    """Return the printable letter that byte-level BPE writes for each byte 0..255 (GPT-2's
    table)."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    return [letters[byte] for byte in range(256)]


def tiny_model(
    arch: str = "llama",
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 320,
    init_std: float = 0.2,
    seed: int = 0,
    **overrides: Any,
) -> Any:
    """Return a random causal LM of a stock transformers architecture, float32, eval mode,
    the same for the same arguments.

    `init_std` 0.2 at hidden 64 gives logits of spread about 1.6: a distribution with clear
    preferences and few near-ties, where the usual 0.02 would make every token about equally likely.
    `overrides` go to the architecture's config class: max_position_embeddings (1024), say. The
    caller's random state is untouched. Raises UserError for an unknown architecture."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if arch not in CONFIG_MAPPING_NAMES:
        raise UserError(
            f"target.arch: no architecture {arch!r} in transformers; try llama, qwen2, gpt2, gemma2"
        )
    shape: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": 2 * hidden,
        "max_position_embeddings": 1024,
        "initializer_range": init_std,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    config = AutoConfig.for_model(arch, **{**shape, **overrides})
    usual = hidden // heads
    if "head_dim" not in overrides and getattr(config, "head_dim", usual) not in (None, usual):
        config.head_dim = usual  # some families default to a head size of their own
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = 2
    model.generation_config.pad_token_id = 0
    return model.eval()
