"""The error tree. Every message says what is wrong, which value, and what to do; the command prints it as one line.

`ConfigError` and its children end the command with exit code 2 before anything is written. The others mean that a
running job failed (exit code 1), unless they are handled.
"""

from typing import ClassVar

_SHOWN_CHARACTERS = 500


class AsyncFlowError(Exception):
    """Base of all errors that AsyncFlow raises on purpose."""

    final: ClassVar[bool] = False  # a restarted process would raise it again, so it ends the run
    deadline: ClassVar[bool] = False  # a process was waited for in vain; its stacks are worth seeing


class ConfigError(AsyncFlowError):
    """The user's input (command line, YAML, data, model directory) cannot be used. Exit code 2."""

    final = True


class TransportError(AsyncFlowError):
    """A channel to a named peer broke, timed out, or carried something that the protocol forbids."""


class SealBroken(TransportError):
    """A value in the job store was not written by this job. Names the key."""

    final = True


class DeadlineExceeded(TransportError):
    """One process waited too long for another. Names both, what it waited for, and how long (s)."""

    deadline = True


class LeaseFenced(TransportError):
    """A put or ack came from a former owner of the lease: the rows have another owner now. Drop the work."""


class PeerRefused(TransportError):
    """The other side refused the request (unknown row, unknown task, wrong proof of the job secret, ...)."""


class QueueFull(PeerRefused):
    """The queue has no room; says what it waits for."""


class RowsExist(PeerRefused):
    """A put names rows that the queue already has; indices are never reused in a run."""


class PutPending(PeerRefused):
    """Another put, perhaps an earlier one of this client, is storing one of these rows, and may fail: put again."""


class ProducersGone(DeadlineExceeded):
    """A consumer waits for rows, but no producer of them has been connected for too long."""


class WeightSyncError(AsyncFlowError):
    """Weights could not be planned, transferred or verified."""


class WeightsLate(WeightSyncError):
    """Weights, or memory for them, did not come in time. Names both sides of the wait, and how long it was (s)."""

    deadline = True


class DeviceMemoryError(WeightSyncError):
    """A vendor's runtime refused to allocate, export, open or copy device memory. Names its call and its code."""


class PlanError(WeightSyncError):
    """Trainer and receivers disagree on parameters: one exists on one side only, or shapes differ."""

    final = True


class WeightsNotDelivered(WeightSyncError):
    """A generating engine does not compute with the weights that the trainer published. Names the instance, the
    version and, where they are known, the tensors; no response drawn with them has left the instance.
    """


class WeightsNeverDelivered(WeightsNotDelivered):
    """The same, once more after the instance was started again."""

    final = True


class CheckpointError(AsyncFlowError):
    """A checkpoint is missing, incomplete, or belongs to another model."""


class BadRequest(AsyncFlowError):
    """No engine can compute this: a prompt is empty or too long for the model, a token is unknown, lengths do not
    fit.
    """

    final = True


class EngineFailed(AsyncFlowError):
    """A generating library or server did not start, ended, or failed a response. Names it; its log says more."""


class TrainingDiverged(AsyncFlowError):
    """A loss, gradient or probability is not finite, or the policy left its reference or its generating engine.

    Says at which step, and what to go back to.
    """

    final = True


class UserCodeFailed(AsyncFlowError):
    """A user's function that the run depends on raised, hung, or returned something unusable."""

    final = True


class UserCodeNotStarted(UserCodeFailed):
    """The process of a user's function did not start: perhaps memory or disk space was short."""

    final = False


class NothingToLearn(AsyncFlowError):
    """Too many prompts are always, or never, answered correctly. Says how many, and what to change."""

    final = True


class TooManyFailures(AsyncFlowError):
    """Too many parts of a step failed. Says how many, the last reason, and the setting."""

    final = True


class RoleFailed(AsyncFlowError):
    """A worker died. Names role, rank and the last error."""


class LastSaveFailed(CheckpointError):
    """At its end a run cannot save what it trained since its last checkpoint; a restart would end in the same way."""

    final = True


def one_line(error: BaseException) -> str:
    """Return type and message of a foreign error, printable, on one line, shortened for use in a message."""
    try:
        message = " ".join(str(error).split())
    except Exception:  # noqa: BLE001  `__str__` may be user code
        message = ""
    shown = message if len(message) <= _SHOWN_CHARACTERS else f"{message[: _SHOWN_CHARACTERS - 3]}..."
    return f"{type(error).__name__}: {printable(shown)}" if shown else type(error).__name__


def printable(text: str) -> str:
    """Escape control characters and lone surrogates; idempotent."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


# Sizes for people. Pure.

_UNITS = ("B", "kB", "MB", "GB", "TB")


def size_text(num_bytes: float) -> str:
    """Return a size like `1.5 GB` (decimal units)."""
    for unit in _UNITS[:-1]:
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} {_UNITS[-1]}"
