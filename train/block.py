"""Train a block head (DFlash, DSpark) on a frozen target.

    accelerate launch train/block.py target=smollm2 head=dflash data=jsonl data.path=FILE \\
        out_dir=runs/dflash steps=N

One pass guesses the K tokens behind an anchor x_t from the target's features f before it:

    h_1 .. h_K = N(x_t, mask, .., mask; f_{<t}),     q_k = softmax(P h_k + W1[x_{t+k-1}] W2)
    loss = sum over drawn anchors t and k of  w_k  l(q_k(. | t), p(. | x_<t+k), x_{t+k})

where W1 and W2 (DSpark alone) read the token before, w_k falls with k, p is the target's
distribution and l that of heads/losses.py (plain_loss). h and q stand in heads/block/net.py
and head.py, w in heads/block/loss.py, the update in train/loop.py (train_step).
"""

import sys

# train/ is first on sys.path and would shadow libraries
sys.path[0] = __file__.rpartition("/train/")[0]

from outrider.train import launch

main = launch.trainer("block", __name__)

if __name__ == "__main__":
    launch.run(main)
