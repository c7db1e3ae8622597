"""Turn a text into a checkpoint, offline: `python -m training prepare | train | evaluate | sample | …`.

A map, in the order a run passes:

    __main__.py     the commands and their flags
    config.py       everything a run is made of, and the presets
    data.py         a text -> a memory-mapped array of ids, split; the order of the windows
    distributed.py  processes that train one model together
    fused.py        the model's forward and backward for a CPU, written out
    optim.py        Muon for the hidden matrices, AdamW for the rest, the learning-rate schedule
    loop.py         the training loop: steps, evaluations, saves, signals, the report
    evaluate.py     whole-split and streamed losses, baselines
    speed.py        the share of the machine's matrix-product peak that a run uses
    display.py      what a run shows: progress, tables, curves
    state.py        what a run needs to go on exactly where it stopped, without pickle

and of a checkpoint: sample.py, score.py, report.py and export.py, one for each command.

Import rule: `service.model` and, for sampling, `service.engine.engine`; nothing else of `service`.
"""
