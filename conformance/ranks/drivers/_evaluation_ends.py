"""How evaluations of averages end, step by step: many with an exception of the evaluation's own."""


class EvaluationError(Exception):
    """The error of an evaluation that fails."""


class Interrupted(KeyboardInterrupt):
    """A user stops the evaluation."""


class Exits(SystemExit):
    """The evaluation ends the process, and somebody catches that."""


class Cancelled(BaseException):
    """An interrupt of another library, such as asyncio.CancelledError."""


# How evaluations end, step by step. In those of NESTS another one is nested.
NESTS = (2, 6)
# In these the model is frozen, as by model.requires_grad_(False).
FROZEN = (3, 4, 6)
ENDS = (None, EvaluationError, None, Interrupted, None, Cancelled, None, Exits)
