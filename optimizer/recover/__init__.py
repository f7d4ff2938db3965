"""Recovery: trains what a recipe makes of a model to give what the model gave, in the very program that is exported."""

from .finished import FinishedRecovery
from .options import RecoverOptions, RecoveryReport
from .recovery import recover

__all__ = ["FinishedRecovery", "RecoverOptions", "RecoveryReport", "recover"]
