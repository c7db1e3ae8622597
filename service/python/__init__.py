"""The installed package `chargpt`: load a model, and use it in this process. service/PYTHON.md has recipes."""

from service.local import *  # noqa: F403
from service.local import __all__ as __all__
