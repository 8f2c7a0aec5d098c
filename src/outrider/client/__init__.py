"""Talk to an Outrider cluster from Python.

::

    from outrider.client import Client

    with Client("127.0.0.1:7070") as client:
        print(client.generate("def fib(n):", max_tokens=64).text)

        with client.stream("def fib(n):", max_tokens=64) as stream:
            for text in stream:
                print(text, end="", flush=True)
        print(stream.completion.to_dict())

        answer = client.generate("def fib(n):", max_tokens=64, n=3, min_p=0.05, logprobs=5)
        for choice in answer.choices:
            print(choice.text, choice.logprobs)

A router with TLS and keys: ``Client("router:7070", ca_certs="ca.crt", api_key=...)``; see ``AsyncClient``.

The keyword arguments are those of ``Options``. ``AsyncClient`` is the same with ``await``. Every call has a deadline.
What goes wrong is raised as one of the exceptions of ``outrider.core.errors``, which are named here too. The client
needs grpcio and protobuf, and nothing of a server.
"""

from outrider.client._async import AsyncClient, AsyncStream
from outrider.client._completion import (
    Choice,
    Completion,
    Delta,
    Speculation,
    Timing,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from outrider.client._endpoint import Endpoint
from outrider.client._request import Message, Options, Prompt
from outrider.client._sync import Client, Stream
from outrider.core.errors import (
    ConfigError,
    Conflict,
    DeadlineExceeded,
    GenerationFailed,
    InvalidRequest,
    NotFound,
    OutriderError,
    Overloaded,
    Unauthenticated,
    Unavailable,
)

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Choice",
    "Client",
    "Completion",
    "ConfigError",
    "Conflict",
    "DeadlineExceeded",
    "Delta",
    "Endpoint",
    "GenerationFailed",
    "InvalidRequest",
    "Message",
    "NotFound",
    "Options",
    "OutriderError",
    "Overloaded",
    "Prompt",
    "Speculation",
    "Stream",
    "Timing",
    "TokenLogprob",
    "TopLogprob",
    "Unauthenticated",
    "Unavailable",
    "Usage",
]
