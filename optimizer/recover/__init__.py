"""Recovery: trains the weights of a changed model, in the program that is exported, to predict as the source does."""

from .finished import FinishedRecovery
from .options import RecoverOptions, RecoveryReport
from .recovery import recover

__all__ = ["FinishedRecovery", "RecoverOptions", "RecoveryReport", "recover"]
