"""Offline training: turns text into a checkpoint. `python -m training prepare | train | evaluate | sample | …`

The modules, in the order a run uses them:

    __main__.py     the commands and their flags
    config.py       the settings of a run, and the presets
    recipe.py       what a small text decides instead of the preset
    plan.py         what --minutes decides instead of the preset
    data.py         text to memory-mapped character ids; the split; the order of the windows
    records.py      how a text is split into records
    jobs.py         `train`, from its flags to the loop: starts and resumes runs
    inputs.py       the checkpoints, texts and patterns that a command is given
    check.py        what is said of a text before a run: its size, duplicates, rare symbols
    distributed.py  data-parallel processes
    device.py       device, dtype and threads
    finetune.py     the start from another checkpoint's weights
    distill.py      the predictions of teachers
    fused.py, .cpp  the model's forward and backward, hand-written for CPUs
    selfcheck.py    whether fused.py, the checkpoints and the service still fit gpt.py
    optim.py        Muon for the hidden matrices, AdamW for the rest, and their schedules
    run.py          the state of a run, its folder, and what it prints
    loop.py         the training loop: steps, the loss, evaluations, the final report
    evaluate.py     windowed and streamed losses, baselines
    native_scores.py  losses of texts by the service's native engine
    speed.py        speed as a share of the machine's matrix-product peak
    display.py      progress, tables, curves
    log.py          the log and TensorBoard's event files
    state.py        what a resumed run needs, without pickle
    saving.py       checkpoints, as the service reads them
    folders.py      folders, replaced atomically
    messages.py     wording that commands share

The loss is Run.loss in loop.py, and a step is Run.step. The schedules of learning rate, momentum and weight decay are
at the end of optim.py. That of the windows is TrainConfig.window_at in config.py.

sample.py, score.py, report.py, export.py and lecture.py each hold the command of that name;
examination.py is what report says, and rows.py prints rows as JSON lines or CSV.

Import rule: `service.model`, and for sampling and for loading fused.cpp `service.engine`, `service.constrain` and
`service.wire`; nothing else of `service`.
"""
