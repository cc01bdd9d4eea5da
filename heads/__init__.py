"""Draft heads: modules that hang on a frozen target and learn to guess what it says next.

The contract is heads.base.Head:

    for_target(target, cfg, counts)  a fresh head; its keys are a Config, its weights float32
    forward(batch, target)           the training loss, summed, with its count
    teacher_forced(batch, target, levels)    what a draft would be on the text's own tokens
    drafter(target, draft)           a drafter over a copy of the weights, see names.DraftSpec
    config_json() / from_json()      what rebuilds it (heads.saved)

Vocabulary, calibration, disk and the target's distribution are the base's. `teacher_forced` and
`drafter` must agree: parity.py compares them. To add a head: docs/new-head.md, a folder with a
subclass of Head and a YAML, here or in a package of one's own, and a line in registry.py.

What goes where: names.py reads a drafter's name, folders.py and hub.py find its files,
saved.py and checkpoint.py write and read them, tuned.py adds what scripts/tune.py left,
drafters.py makes the drafter; layers/ is what heads with decoder layers share, interop/
other engines' formats.
"""
