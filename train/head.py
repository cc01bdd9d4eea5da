"""Train a head of any kind, also one that an own package brings (docs/new-head.md).

    accelerate launch train/head.py head=eagle3 target=smollm2 data=jsonl data.path=FILE \\
        out_dir=runs/eagle3 steps=N

What is learned is the head's own forward, which returns its loss, summed over supervised
tokens, and their count (heads/base.py):

    step:  g = sum over micro-batches and ranks of grad forward(batch, target).sum,
           w <- AdamW(w, g / sum of forward(batch, target).count)

The step is in train/loop.py (train_step); train/medusa.py, eagle.py, hydra_heads.py,
block.py and draft.py each train one family, and open with its formula.
"""

import sys

# train/ is first on sys.path and would shadow libraries
sys.path[0] = __file__.rpartition("/train/")[0]

from outrider.train import launch

main = launch.trainer("head", __name__)

if __name__ == "__main__":
    launch.run(main)
