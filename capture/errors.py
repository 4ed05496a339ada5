"""Failures of a capture that a user can act on."""

from eyas.taps.errors import EyasError

# What a capture says after the name of an engine's process that is gone.
WHY_ENDED = (
    "(what it said, if it could, stands above; if nothing does, it may have been killed for memory). What was sealed "
    "is kept: run the same command again to go on"
)


class TargetError(EyasError):
    """The target cannot be loaded, has no stack of decoder layers that eyas can find, or does not fit the options."""


class SelfTestError(EyasError):
    """The engine's captured tensors are not the taps asked for, or ranks disagree. Nothing was written."""


class PreparedError(EyasError):
    """A prepared folder is missing, unreadable or of another tokenizer than the target."""


class CaptureFailed(EyasError):
    """The engine failed, or more samples were rejected than the user allows. What was captured is kept."""


class ConversationsError(EyasError):
    """The input of eyas prepare is not there, or is of no known form."""


class EndpointError(EyasError):
    """A server is not there, serves another model than the target, or refuses what it is asked."""
