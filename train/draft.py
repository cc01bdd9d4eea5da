"""Train a separate small draft model for a frozen target, cut from it or started from a
smaller relative.

    accelerate launch train/draft.py target=smollm2 head=small_lm head.from_target_layers=6 \\
        data=jsonl data.path=FILE out_dir=runs/draft steps=N

It reads tokens alone and learns to be the target:

    q(. | x_<s) = softmax(P h(x_<s)),     loss = sum over supervised x_s of  l(q, p(. | x_<s), x_s)

with p the target's distribution and l of heads/losses.py (plain_loss). h and q stand in
heads/small_lm/head.py, the update in train/loop.py (train_step).

OUT/head is an ordinary transformers folder: `AutoModelForCausalLM.from_pretrained` and
`assistant_model=` take it.
"""

import sys

# train/ is first on sys.path and would shadow libraries
sys.path[0] = __file__.rpartition("/train/")[0]

from outrider.train import launch

main = launch.trainer("draft", __name__)

if __name__ == "__main__":
    launch.run(main)
