"""Between our exceptions and gRPC statuses. Servers answer with them, clients raise them again.

A status carries two details of ``google.rpc``: ``ErrorInfo``, whose reason is the exception's class, and for an
``InvalidRequest`` a ``BadRequest`` that names the field.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Iterable
from typing import Any, NoReturn

import grpc
from google.rpc import code_pb2, error_details_pb2, status_pb2

from outrider.core import errors
from outrider.core.errors import InvalidRequest, OutriderError, for_log

DOMAIN = "outrider"
DETAILS_KEY = "grpc-status-details-bin"
# Metadata of more than 8 kB is refused by many gRPC peers. A line is in it twice, once with up to three bytes for each
# of its own, beside a field's value and its limit.
MAX_BYTES = 800

_CODES: dict[type[OutriderError], int] = {
    errors.InvalidRequest: code_pb2.INVALID_ARGUMENT,
    errors.Unauthenticated: code_pb2.UNAUTHENTICATED,
    errors.Overloaded: code_pb2.RESOURCE_EXHAUSTED,
    errors.Unavailable: code_pb2.UNAVAILABLE,
    errors.DeadlineExceeded: code_pb2.DEADLINE_EXCEEDED,
    errors.Conflict: code_pb2.ALREADY_EXISTS,
    errors.NotFound: code_pb2.NOT_FOUND,
    errors.GenerationFailed: code_pb2.INTERNAL,
    errors.ConfigError: code_pb2.FAILED_PRECONDITION,
    errors.GroupError: code_pb2.UNAVAILABLE,
}
_BY_NAME = {kind.__name__: kind for kind in _CODES}
_BY_CODE = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.OutriderError,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.Overloaded,
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.ALREADY_EXISTS: errors.Conflict,
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.INTERNAL: errors.GenerationFailed,
}


def error_to_status(error: OutriderError) -> status_pb2.Status:
    """The status that stands for an exception."""
    kind = next((kind for kind in type(error).__mro__ if kind in _CODES), None)
    status = status_pb2.Status(code=_CODES[kind] if kind else code_pb2.UNKNOWN, message=_one_line(error))
    info = error_details_pb2.ErrorInfo(reason=(kind or OutriderError).__name__, domain=DOMAIN)
    if isinstance(error, InvalidRequest):
        info.metadata.update(field=_cut(error.field), value=_cut(repr(error.value)), limit=_cut(error.limit))
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_cut(error.field), description=_cut(f"must be {error.limit}")
        )
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    status.details.add().Pack(info)
    return status


def error_from_rpc(error: grpc.aio.AioRpcError, *, address: str = "") -> OutriderError:
    """The exception that a failed call stands for; ``address`` is named where the server cannot be reached."""
    code, line = error.code(), error.details() or ""
    info = _error_info(error)
    if info is not None:
        if info.reason == InvalidRequest.__name__:
            return InvalidRequest(info.metadata["field"], _Shown(info.metadata["value"]), info.metadata["limit"])
        if info.reason in _BY_NAME:
            return _BY_NAME[info.reason](line)
    if code is grpc.StatusCode.UNAVAILABLE and address:
        return errors.Unavailable(f"no answer from {address} ({line}); is the cluster up?")
    return _BY_CODE.get(code, OutriderError)(f"{code.name}: {line}")


def code_name(error: BaseException) -> str:
    """The gRPC status that an exception stands for, such as ``INVALID_ARGUMENT``; ``INTERNAL`` for a fault of ours."""
    kind = next((kind for kind in type(error).__mro__ if kind in _CODES), None)
    code: str = code_pb2.Code.Name(_CODES[kind] if kind else code_pb2.INTERNAL)
    return code


def code_names() -> list[str]:
    """Every name that ``code_name`` gives."""
    return sorted({code_pb2.Code.Name(code) for code in (*_CODES.values(), code_pb2.INTERNAL)})


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: OutriderError) -> NoReturn:
    """End a call with the status of an exception."""
    status = error_to_status(error)
    code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
    await context.abort(code, status.message, ((DETAILS_KEY, status.SerializeToString()),))
    raise AssertionError("abort returned")  # it raises; this tells the type checker


@contextlib.asynccontextmanager
async def errors_as_status(
    context: grpc.aio.ServicerContext[Any, Any], log: logging.Logger, what: str
) -> AsyncIterator[None]:
    """Within it, our exceptions end the call with their status; others are logged and end it with INTERNAL."""
    try:
        yield
    except OutriderError as error:
        log.info("%s: %s", what, for_log(error))
        await abort_with(context, error)
    except (grpc.aio.AbortError, grpc.RpcError):
        raise
    except Exception as error:
        log.exception("%s failed", what)
        await abort_with(context, OutriderError(f"a fault in the server ({type(error).__name__}); its log has more"))


class _Shown(str):
    """A value as the server showed it: its ``repr`` is itself."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _error_info(error: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo | None:
    metadata: Iterable[tuple[str, str | bytes]] = error.trailing_metadata() or ()  # type: ignore[assignment]
    packed = dict(metadata).get(DETAILS_KEY)
    if not isinstance(packed, bytes):
        return None
    for detail in status_pb2.Status.FromString(packed).details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.domain == DOMAIN:
            return info
    return None


def _one_line(error: Exception) -> str:
    return _cut(" ".join(str(error).split()))


def _cut(text: str) -> str:
    return text.encode("utf-8", "replace")[:MAX_BYTES].decode("utf-8", "ignore")
