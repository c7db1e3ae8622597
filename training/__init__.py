"""Offline training: it turns text into a checkpoint. `python -m training prepare | train | evaluate | sample | …`

    __main__.py     runs a command, and prints its errors
    messages.py     texts that several commands print
    folders.py      replaces folders atomically

    text/           turns a text into ids and batches
      files.py        finds and reads files
      records.py      splits a text into records
      encoding.py     encodes text as ids
      batches.py      draws windows or records, and arranges them as batches
      corpus.py       encodes a text to memory-mapped character ids, in a cache, and splits it
    config.py       defines the settings of a run, and the presets
    model/          computes a step, and loads models
      fused.py, .cpp  the model's forward and backward, hand-written for CPUs
      device.py       chooses device, dtype and threads
      optim.py        Muon for the hidden matrices, AdamW for the other parameters, and their schedules
      selfcheck.py    checks that fused.py, the checkpoints and the service agree with gpt.py
      loading.py      finds a checkpoint, loads its model, and opens a model to sample
      teachers.py     computes the predictions of teachers
    measure/        measures a model
      losses.py       computes windowed and streamed losses
      counts.py       baselines that count, and the counts that a network learns from
      mixture.py      fits the weights that mix a network with counts, and measures the gain
      copies.py       finds copied passages and repetitions in samples
    fit/            settings that the user left open
      settings.py     the settings of a run in four layers, and how they are merged
      rules.py        the rules by which open settings follow from a text
      plan.py         plans a run: for the steps of a preset, or for --minutes
      origin.py       starts a run from the weights of a checkpoint
      warnings.py     warns before a run about the text: its size, duplicates, rare symbols
    run/            one run, from its settings to its folder
      errors.py       why a run ends early
      signals.py      catches the signals that end a run after a save
      distributed.py  data-parallel processes
      saved.py        the state from which a run resumes, saved without pickle
      saving.py       saves checkpoints in the format that the service reads
      log.py          writes the log and TensorBoard event files
      run.py          Run: the model, its optimizers, its sampler and its progress
      estimate.py     Estimate: the time and the FLOPs that a run takes
      folder.py       RunFolder: the folder of a run, locked and written
      progress.py     shows progress and the final report
      curves.py       draws the curves of a run
      loop.py         the training loop: steps, the loss, evaluations, the final report
      start.py        decides the settings of a run and starts it
      resume.py       resumes a run
    commands/       the commands that a user types
      prepare.py, train.py, evaluate.py, sample.py, score.py, report.py, export.py and lecture.py
      flags.py        defines the flags of each command
      inputs.py       reads the texts that a command is given
      rows.py         prints rows as JSON lines or CSV

In run/loop.py, `loss` is the loss and `step` is a step. The schedules of learning rate, momentum and weight decay
are at the end of model/optim.py. The schedule of the windows is TrainConfig.window_at in config.py.

Import rules: of the packages and modules in `service`, training may import `service.model`, `service.engine`,
`service.text`, `service.local` and `service.wire`. The folders are listed in the order of their imports: each imports
only what stands above it. tests/test_imports.py checks both.
"""
