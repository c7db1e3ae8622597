"""Offline training: turns text into a checkpoint. `python -m training prepare | train | evaluate | sample | …`

The modules, in the order a run uses them:

    __main__.py     the commands and their flags
    config.py       the settings of a run, and the presets
    data.py         text to memory-mapped character ids; the split; the order of the windows
    distributed.py  data-parallel processes
    finetune.py     the start from another checkpoint's weights
    fused.py        the model's forward and backward, hand-written for CPUs
    optim.py        Muon for the hidden matrices, AdamW for the rest; the learning-rate schedule
    loop.py         the training loop: steps, evaluations, saves, signals, the final report
    evaluate.py     windowed and streamed losses, baselines
    speed.py        speed as a share of the machine's matrix-product peak
    display.py      progress, tables, curves
    board.py        TensorBoard event files
    state.py        what a resumed run needs, without pickle

sample.py, score.py, report.py and export.py each hold the command of that name.

Import rule: `service.model`, and for sampling `service.engine` and `service.wire`; nothing else of `service`.
"""
