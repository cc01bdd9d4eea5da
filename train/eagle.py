"""Train an EAGLE head (EAGLE-3, EAGLE-1, HASS) on a frozen target.

    accelerate launch train/eagle.py target=smollm2 head=eagle3 data=jsonl data.path=FILE \\
        out_dir=runs/eagle3 steps=N

One decoder layer D on (g, e): at step s = 0 .. S - 1 row t guesses x_{t+s+2}, where g^0_t
are the target's fused features and later ones its own outputs, as in drafting:

    g^{s+1}_t = D(g^s_t, e_{t+s+1}; keys of the rows before),   q^s_t = softmax(P norm(g^{s+1}_t))
    loss = sum over supervised x_j and s of  step_decay^s  l(q^s_{j-s-2}, p(. | x_<j), x_j)

with p the target's distribution and l of heads/losses.py (plain_loss); EAGLE-1 adds the
distance of g to the target's feature. g and q stand in heads/eagle/net.py and head.py, the
update in train/loop.py (train_step).
"""

import sys

# train/ is first on sys.path and would shadow libraries
sys.path[0] = __file__.rpartition("/train/")[0]

from outrider.train import launch

main = launch.trainer("eagle", __name__)

if __name__ == "__main__":
    launch.run(main)
