"""How llama.cpp reads a GGUF file, written from its graphs and from nothing of heads/: the
self-check of `format=gguf`.

Rotary positions turn neighbouring numbers (2i, 2i + 1), `d2t` holds target ids, features lie
side by side in the order of `target_layers`. Everything is float32 without a cache.

Shape letters: n committed tokens that have a feature, T rows, D width, F features, K drafted
tokens, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from heads.interop.gguf_read import read_gguf
from scripts.serving.block_reader import BlockFile, block_rows, chosen
from scripts.serving.reader import Drafts, Features

# llama.cpp's names of a block head's tensors -> those of scripts/serving/block_reader.py; the
# longer ones first
BLOCK_NAMES = {
    "enc.output_norm": "hidden_norm",
    "output_norm": "norm",
    "blk.": "layers.",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class Served:
    """A GGUF file as llama.cpp sees it. embed: the target's [V, D], for files without one."""

    def __init__(self, path: Path, embed: Tensor) -> None:
        file = read_gguf(path)
        self.arch = str(file.fields["general.architecture"])
        self.fields = {
            name.removeprefix(f"{self.arch}."): value
            for name, value in file.fields.items()
            if name.startswith(f"{self.arch}.")
        }
        self.mask = int(file.fields.get("tokenizer.ggml.mask_token_id", -1))
        self.tensors = file.tensors
        self.types = file.types
        self.embed = self.tensors.get("token_embd.weight", embed.detach().float().cpu())
        self.eps = float(self.fields["attention.layer_norm_rms_epsilon"])

    def draft(self, ids: Tensor, features: Features, count: int) -> Drafts:
        """Greedy drafts behind ids [n + 1] (the last one has no feature yet): an `eagle3` or
        `dflash` file with features, a `llama` file without."""
        if self.arch == "dflash":
            return self._block(ids, features, count)
        return (
            self._eagle3(ids, features, count) if self.arch == "eagle3" else self._own(ids, count)
        )

    def logits(self, ids: Tensor) -> Tensor:
        """[V] behind ids [T], of a `llama` file."""
        y = self.embed[ids]
        for number in range(self.fields["block_count"]):
            name = f"blk.{number}."
            x = self._norm(y, f"{name}attn_norm")
            y = y + self._attention(x, name)
            y = y + self._mlp(self._norm(y, f"{name}ffn_norm"), name)
        head = self.tensors.get("output.weight", self.embed)
        return head @ self._norm(y[-1], "output_norm")

    def _own(self, ids: Tensor, count: int) -> Drafts:
        rows: list[Tensor] = []
        for _ in range(count):
            rows.append(self.logits(ids))
            ids = torch.cat([ids, rows[-1].argmax()[None]])
        return Drafts(ids[-count:], torch.stack(rows))

    def _eagle3(self, ids: Tensor, features: Features, count: int) -> Drafts:
        taps = tuple(int(k) for k in self.fields["target_layers"])
        x = features(taps).float().flatten(1)
        if self.fields.get("norm_before_fc"):
            x = self._norm(x, "enc.output_norm")
        hidden = x @ self.tensors["fc.weight"].T
        tokens, rows = ids[1:].tolist(), []
        for _ in range(count):
            e = self._norm(self.embed[torch.tensor(tokens)], "blk.0.attn_norm")
            g = self._norm(hidden, "blk.0.attn_norm_2")
            base = g if self.fields.get("norm_before_residual") else hidden
            y = base + self._attention(torch.cat([e, g], -1), "blk.0.")
            last = (y + self._mlp(self._norm(y, "blk.0.ffn_norm"), "blk.0."))[-1]
            row = self._spread(self.tensors["output.weight"] @ self._norm(last, "output_norm"))
            tokens.append(int(row.argmax()))
            rows.append(row)
            hidden = torch.cat([hidden, last[None]])
        return Drafts(torch.tensor(tokens[-count:]), torch.stack(rows))

    def _block(self, ids: Tensor, features: Features, count: int) -> Drafts:
        field = self.fields
        biased = "markov_w1.weight" in self.tensors
        before = int(not (biased and field.get("sample_from_anchor", True)))
        shape = {
            "rms_norm_eps": self.eps,
            "head_dim": field["attention.key_length"],
            "num_attention_heads": field["attention.head_count"],
            "num_key_value_heads": field["attention.head_count_kv"],
            "num_hidden_layers": field["block_count"],
        }
        tensors = {}
        for name, value in self.tensors.items():
            for theirs, plain in BLOCK_NAMES.items():
                name = name.replace(theirs, plain)
            tensors[name] = value
        rows = count + before  # what is asked for, not what it was trained with
        taps, causal = tuple(field["target_layers"]), bool(field.get("attention.causal"))
        file = BlockFile(tensors, shape, rows, self.mask, causal, before, taps)
        size = int(shape["head_dim"])
        frequency = float(field["rope.freq_base"]) ** (-torch.arange(0, size, 2).float() / size)

        def turn(x: Tensor, places: Tensor) -> Tensor:
            """The two halves of a head: Qwen3's order."""
            angle = places.float()[:, None] * frequency
            cos, sin = angle.cos(), angle.sin()
            left, right = x.chunk(2, -1)
            return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)

        hidden = block_rows(file, self.embed, ids, features(taps).float(), turn)[before:]
        bias = None
        if biased:
            far = self._spread(self.tensors["markov_w2.weight"], 0.0)
            bias = (self.tensors["markov_w1.weight"], far)
        head = self.tensors["output.weight"]
        return Drafts(*chosen(hidden, int(ids[-1]), lambda h: self._spread(head @ h), bias))

    def _spread(self, own: Tensor, rest: float = -torch.inf) -> Tensor:
        """Rows of the draft vocabulary at their target ids; `rest` elsewhere."""
        if "d2t" not in self.tensors:
            return own
        out = torch.full((self.embed.shape[0], *own.shape[1:]), rest)
        out[self.tensors["d2t"]] = own
        return out

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return x * scale * self.tensors[f"{name}.weight"]

    def _mlp(self, x: Tensor, name: str) -> Tensor:
        gate = F.silu(x @ self.tensors[f"{name}ffn_gate.weight"].T)
        up = x @ self.tensors[f"{name}ffn_up.weight"].T
        return (gate * up) @ self.tensors[f"{name}ffn_down.weight"].T

    def _attention(self, x: Tensor, name: str) -> Tensor:
        """Causal attention over rows x [T, ..] at positions 0 .. T - 1."""
        length = len(x)
        heads = int(self.fields["attention.head_count"])
        groups = int(self.fields["attention.head_count_kv"])
        size = int(self.fields["attention.key_length"])

        def split(part: str, count: int) -> Tensor:
            rows = x @ self.tensors[f"{name}attn_{part}.weight"].T
            return rows.view(length, count, size).transpose(0, 1)

        q, k = self._turned(split("q", heads)), self._turned(split("k", groups))
        k, v = (t.repeat_interleave(heads // groups, 0) for t in (k, split("v", groups)))
        score = q @ k.transpose(1, 2) / size**0.5
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        mixed = torch.softmax(score.masked_fill(later, -torch.inf), -1) @ v
        rows = mixed.transpose(0, 1).reshape(length, heads * size)
        return rows @ self.tensors[f"{name}attn_output.weight"].T

    def _turned(self, y: Tensor) -> Tensor:
        """y [H, T, hd] with neighbouring numbers turned by their positions."""
        size = y.shape[-1]
        base = float(self.fields["rope.freq_base"])
        frequency = base ** (-torch.arange(0, size, 2).float() / size)
        frequency = frequency / self.tensors.get("rope_freqs.weight", torch.ones(()))
        angle = torch.arange(y.shape[1]).float()[:, None] * frequency
        cos, sin = angle.cos(), angle.sin()
        even, odd = y[..., 0::2], y[..., 1::2]
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
