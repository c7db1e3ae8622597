"""Offline training: it turns text into a checkpoint. `python -m training prepare | train | evaluate | sample | …`

The modules, in the order in which a run uses them:

    __main__.py     defines the commands and their flags
    config.py       defines the settings of a run, and the presets
    recipe.py       fits open settings to a small text
    plan.py         fits a run to --minutes
    data.py         encodes text to memory-mapped character ids, splits it, and draws windows
    records.py      splits a text into records
    jobs.py         `train`, from its flags to the loop: starts and resumes runs
    inputs.py       reads the checkpoints and texts that a command is given, and opens a model to sample
    check.py        warns before a run about the text: its size, duplicates, rare symbols
    distributed.py  runs data-parallel processes
    device.py       chooses device, dtype and threads
    finetune.py     starts a run from the weights of a checkpoint
    distill.py      computes the predictions of teachers
    fused.py, .cpp  the model's forward and backward, hand-written for CPUs
    selfcheck.py    checks that fused.py, the checkpoints and the service agree with gpt.py
    optim.py        Muon for the hidden matrices, AdamW for the other parameters, and their schedules
    run.py          the state of a run, its folder and its output
    loop.py         the training loop: steps, the loss, evaluations, the final report
    evaluate.py     computes windowed and streamed losses
    counts.py       computes the losses of baselines that count: unigrams, and n-grams with Kneser-Ney
    speed.py        measures the machine's matrix-product peak, and counts FLOPs
    display.py      shows progress, tables and curves
    log.py          writes the log and TensorBoard event files
    state.py        saves the state from which a run resumes, without pickle
    saving.py       saves checkpoints in the format that the service reads
    folders.py      replaces folders atomically
    messages.py     texts that several commands print

Run.loss in loop.py is the loss, and Run.step is a step. The schedules of learning rate, momentum and weight decay are
at the end of optim.py. The schedule of the windows is TrainConfig.window_at in config.py.

sample.py, score.py, report.py, export.py and lecture.py each contain the command of the same name. examination.py
computes the findings of report. rows.py prints rows as JSON lines or CSV.

Import rule: of the packages and modules in `service`, training may import `service.model`, `service.engine`,
`service.constrain` and `service.wire`. tests/test_imports.py checks the rule.
"""
