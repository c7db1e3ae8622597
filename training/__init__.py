"""Offline training: it turns text into a checkpoint. `python -m training prepare | train | evaluate | sample | …`

The modules, in the order in which a run uses them:

    __main__.py     defines the commands and their flags
    config.py       defines the settings of a run, and the presets
    text/           turns a text into ids and batches:
      files.py      finds and reads files
      records.py    splits a text into records
      encoding.py   encodes text as ids
      batches.py    draws windows or records, and arranges them as batches
      corpus.py     encodes a text to memory-mapped character ids, in a cache, and splits it
    jobs.py         `train`, from its flags to the loop: starts and resumes runs
    inputs.py       reads the texts that a command is given
    distributed.py  runs data-parallel processes
    model/          what computes a step, and the models that are loaded:
      device.py     chooses device, dtype and threads
      optim.py      Muon for the hidden matrices, AdamW for the other parameters, and their schedules
      selfcheck.py  checks that fused.py, the checkpoints and the service agree with gpt.py
      loading.py    finds a checkpoint, loads its model, and opens a model to sample
      teachers.py   computes the predictions of teachers
    fused.py, .cpp  the model's forward and backward, hand-written for CPUs
    run.py          the state of a run, its folder and its output
    loop.py         the training loop: steps, the loss, evaluations, the final report
    measure/        what a model is worth:
      losses.py     computes windowed and streamed losses, and baselines
      copies.py     finds copied passages and repetitions in samples
    fit/            settings that the user left open:
      presets.py    fits open settings to a small text
      minutes.py    fits a run to --minutes
      origin.py     starts a run from the weights of a checkpoint
      warnings.py   warns before a run about the text: its size, duplicates, rare symbols
    speed.py        measures the machine's matrix-product peak, and counts FLOPs
    display.py      shows progress, tables and curves
    log.py          writes the log and TensorBoard event files
    state.py        saves the state from which a run resumes, without pickle
    saving.py       saves checkpoints in the format that the service reads
    folders.py      replaces folders atomically
    messages.py     texts that several commands print

Run.loss in loop.py is the loss, and Run.step is a step. The schedules of learning rate, momentum and weight decay are
at the end of model/optim.py. The schedule of the windows is TrainConfig.window_at in config.py.

commands/prepare.py, commands/evaluate.py, sample.py, score.py, report.py, export.py and lecture.py each contain the
command of the same name. rows.py prints rows as JSON lines or CSV.

Import rule: of the packages and modules in `service`, training may import `service.model`, `service.engine`,
`service.constrain` and `service.wire`. A folder imports only the folders above it: text, model, measure, fit, commands.
tests/test_imports.py checks the rules.
"""
