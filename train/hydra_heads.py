"""Train Hydra heads (sequentially dependent Medusa heads, Ankner et al. 2024) on a frozen
target.

    accelerate launch train/hydra_heads.py target=smollm2 data=jsonl data.path=FILE \\
        out_dir=runs/hydra_heads steps=N

Head i = 0 .. K - 1 guesses x_{t+i+2} from f_t and the embeddings of the tokens up to its
guess:

    c = (f_t, e_{t+1}, .., e_{t+i+1}),  h_i = R c + SiLU(W c + b), ..,  q_i = softmax(P_i h_i)
    loss = sum over supervised x_s and i of  decay^i  l(q_i(. | f_{s-i-2}, ..), p(. | x_<s), x_s)

with the text's own tokens in training, the drafted ones in drafting; p is the target's
distribution and l of heads/losses.py (plain_loss). h and q stand in
heads/medusa/hydra_heads.py and base.py, the update in train/loop.py (train_step).
"""

import sys

# train/ is first on sys.path and would shadow libraries
sys.path[0] = __file__.rpartition("/train/")[0]

from outrider.train import launch

main = launch.trainer("hydra_heads", __name__)

if __name__ == "__main__":
    launch.run(main)
