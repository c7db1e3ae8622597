"""The model in Python, with an engine in this process. The installed package `chargpt` has the same names.

    model = load("checkpoints/my/best")
    print(model.generate("ROMEO:", max_tokens=200, seed=1).text)

model.py turns calls into requests in text (service/text), thread.py runs their sequences, results.py has the answers.
"""

from service.local.model import Model, RequestError, load
from service.local.results import Acceptance, Answer, Answers, Character, Next, Results, Sample, Score
from service.local.thread import ModelClosedError
from service.model.checkpoint import CheckpointError

__all__ = [
    "Acceptance", "Answer", "Answers", "Character", "CheckpointError", "Model", "ModelClosedError", "Next",
    "RequestError", "Results", "Sample", "Score", "load",
]  # fmt: skip
