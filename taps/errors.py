"""The errors that every room raises for what a user can mend."""


class EyasError(ValueError):
    """What the user gave cannot be used as it is.

    The message names the file or option, what was found, what was expected, and the command that mends it.
    The command line prints it without a traceback and exits 1.
    """


class UsageError(EyasError):
    """Options that contradict each other or are not what they must be: the command line exits 2."""


EXIT_STOPPED_EARLY = 75  # EX_TEMPFAIL, the exit status where work is left: run the same command again
