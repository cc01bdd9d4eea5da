"""Train Medusa heads on a frozen target.

    accelerate launch train/medusa.py target=smollm2 data=jsonl data.path=FILE \\
        out_dir=runs/medusa steps=N

Head i = 0 .. K - 1 guesses x_{t+i+2} from f_t, the target's feature at t after its final norm:

    h_i = B_L(.. B_1(f_t)),  B(x) = x + SiLU(W x + b),      q_i = softmax(P_i h_i)
    loss = sum over supervised x_s and i of  decay^i  l(q_i(. | f_{s-i-2}), p(. | x_<s), x_s)

with p the target's distribution and l of heads/losses.py (plain_loss). h and q stand in
heads/medusa/head.py and base.py, the update in train/loop.py (train_step).
"""

import sys

# train/ is first on sys.path and would shadow libraries
sys.path[0] = __file__.rpartition("/train/")[0]

from outrider.train import launch

main = launch.trainer("medusa", __name__)

if __name__ == "__main__":
    launch.run(main)
