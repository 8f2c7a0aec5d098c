"""Every exception that Outrider raises on purpose.

::

    OutriderError
    ├── InvalidRequest      a field of a request is wrong           gRPC INVALID_ARGUMENT
    ├── Unauthenticated     no key, or none that is valid           gRPC UNAUTHENTICATED
    ├── Overloaded          the queue is full                       gRPC RESOURCE_EXHAUSTED
    ├── Unavailable         a process that is needed does not answer gRPC UNAVAILABLE
    ├── DeadlineExceeded    the request ran out of time             gRPC DEADLINE_EXCEEDED
    ├── Conflict            the request id is in use                gRPC ALREADY_EXISTS
    ├── NotFound            no such request                         gRPC NOT_FOUND
    ├── GenerationFailed    the target could not produce a token    gRPC INTERNAL
    ├── ConfigError         the settings file or environment is wrong
    └── GroupError          a target group cannot go on
"""

MAX_SHOWN = 200  # characters of a bad value that an error repeats


class OutriderError(Exception):
    """Base of all errors of Outrider. ``str(error)`` is one line that says what is wrong and what to do."""


class InvalidRequest(OutriderError):
    """A field of a request is wrong.

    Attributes:
        field: the field as the client spelt it, such as ``sampling.top_p``.
        value: what was given.
        limit: what is allowed, in words.
    """

    def __init__(self, field: str, value: object, limit: str) -> None:
        self.field = field
        self.value = value
        self.limit = limit
        shown = repr(value)
        shown = shown if len(shown) <= MAX_SHOWN else shown[:MAX_SHOWN] + "..."
        super().__init__(f"{field} is {shown}, but must be {limit}")


class Unauthenticated(OutriderError):
    """The call carries no valid API key."""


class Overloaded(OutriderError):
    """The queue is full; try again later."""


class Unavailable(OutriderError):
    """A process that the request needs does not answer."""


class DeadlineExceeded(OutriderError):
    """The request ran out of time."""


class Conflict(OutriderError):
    """The request id is in use by a request that runs."""


class NotFound(OutriderError):
    """No request of that id is known."""


class GenerationFailed(OutriderError):
    """The target could not produce a token for this request."""


class ConfigError(OutriderError):
    """The settings or the environment are wrong."""


class GroupError(OutriderError):
    """A target group cannot go on and must be rebuilt."""


def for_log(error: OutriderError) -> str:
    """What logs and traces tell of an error: nothing that a client sent.

    Of a wrong field the name alone. The value is the client's, and limits repeat parts of it: where a grammar is wrong,
    say.
    """
    told = error.field if isinstance(error, InvalidRequest) else error
    return f"{type(error).__name__}: {told}"
