"""What the processes of a cluster know of each other: membership, epochs, group ownership, live settings, in Redis.

Everything lives under ``outrider:{<cluster>}:``. A member is a JSON record that expires unless its owner repeats it, so
a dead process is gone after ``ttl_s``. A group's owner holds a lease with a fencing token: the token grows with each
claim, so whoever sees a larger one knows that the holder of a smaller one must be ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
from collections.abc import Awaitable
from typing import Any, Literal, cast

from redis.exceptions import RedisError

from outrider.cluster.redis_access import RedisAccess
from outrider.core.errors import ConfigError, OutriderError, Unavailable

log = logging.getLogger(__name__)

Kind = Literal["target", "draft", "router"]
Record = dict[str, Any]

MINIMUM_VERSION = (6, 2)

# KEYS: index of a kind. ARGV: prefix of its records. Answers id, record, id, record, ...; forgets ids without a record.
_MEMBERS = """
local answer = {}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local record = redis.call('GET', ARGV[1] .. id)
  if record then
    table.insert(answer, id)
    table.insert(answer, record)
  else
    redis.call('SREM', KEYS[1], id)
  end
end
return answer
"""

# KEYS: lease, token counter. ARGV: owner, lifetime in ms. Answers the token, or 0 where somebody else holds the lease.
_CLAIM = """
local held = redis.call('GET', KEYS[1])
if held and string.sub(held, string.find(held, ':') + 1) ~= ARGV[1] then return 0 end
local token = redis.call('INCR', KEYS[2])
redis.call('SET', KEYS[1], string.format('%d:%s', token, ARGV[1]), 'PX', ARGV[2])
return token
"""

# KEYS: lease. ARGV: its value, lifetime in ms.
_RENEW = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""

# KEYS: lease. ARGV: its value.
_RELEASE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
"""


class Registry:
    """One cluster's shared facts. Use it from one event loop; close it with ``aclose``.

    Every call ends within ``timeout_s``; one that cannot be answered raises ``Unavailable`` with the URL in its line.
    """

    def __init__(self, redis: str | RedisAccess, cluster: str, *, ttl_s: float = 3.0, timeout_s: float = 2.0) -> None:
        """``redis``: a URL, or all that the settings say of it."""
        self.redis = RedisAccess.of(redis) if isinstance(redis, str) else redis
        self.cluster = cluster
        self.ttl_s = ttl_s
        self.timeout_s = timeout_s
        self._redis = self.redis.client(
            decode_responses=True, socket_timeout=timeout_s, socket_connect_timeout=timeout_s
        )

    @property
    def url(self) -> str:
        """Without user and password."""
        return self.redis.url

    async def __aenter__(self) -> Registry:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._redis.aclose()

    async def check(self) -> None:
        """Raises ``Unavailable`` if Redis does not answer, ``ConfigError`` if it is too old."""
        info = await self._call(self._redis.info("server"))
        version = str(info["redis_version"])
        if tuple(int(part) for part in version.split(".")[:2]) < MINIMUM_VERSION:
            raise ConfigError(f"Redis at {self.redis} is version {version}; Outrider needs 6.2 or later")

    async def next_epoch(self, group_id: str) -> int:
        """A number larger than every one that this cluster handed out for the group before."""
        return int(await self._call(self._redis.incr(self._key("epoch", group_id))))

    async def announce(self, kind: Kind, member_id: str, record: Record) -> None:
        """Make a member known for ``ttl_s``. Repeat it before that, or use ``Heartbeat``."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.set(self._key(kind, member_id), json.dumps(record), px=self._ttl_ms)
            pipe.sadd(self._key("members", kind), member_id)
            await self._call(pipe.execute())

    async def withdraw(self, kind: Kind, member_id: str) -> None:
        """Forget a member now. Nothing happens if it is unknown."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.delete(self._key(kind, member_id))
            pipe.srem(self._key("members", kind), member_id)
            await self._call(pipe.execute())

    async def members(self, kind: Kind) -> dict[str, Record]:
        """The living members of a kind and what they said of themselves."""
        flat = await self._eval(_MEMBERS, [self._key("members", kind)], [self._key(kind, "")])
        return {flat[i]: json.loads(flat[i + 1]) for i in range(0, len(flat), 2)}

    async def claim_group(self, group_id: str, owner: str) -> int | None:
        """Become a group's owner for ``ttl_s``: the fencing token, or None while somebody else is.

        An owner that claims again gets a new token; its older one no longer counts.
        """
        keys = [self._key("owner", group_id), self._key("token", group_id)]
        return int(await self._eval(_CLAIM, keys, [owner, self._ttl_ms])) or None

    async def renew_group(self, group_id: str, owner: str, token: int) -> bool:
        """Stay the owner for another ``ttl_s``. False: the lease ran out or went to somebody else, so stop at once."""
        key = self._key("owner", group_id)
        return bool(await self._eval(_RENEW, [key], [f"{token}:{owner}", self._ttl_ms]))

    async def release_group(self, group_id: str, owner: str, token: int) -> bool:
        """Give the group up, so that another may claim it at once. False: it was not ours any more."""
        return bool(await self._eval(_RELEASE, [self._key("owner", group_id)], [f"{token}:{owner}"]))

    async def get_settings(self) -> dict[str, Any]:
        """The live settings; those that nobody set are absent."""
        stored = await self._call(cast(Awaitable[dict[str, str]], self._redis.hgetall(self._key("settings"))))
        return {name: json.loads(value) for name, value in stored.items()}

    async def set_settings(self, settings: dict[str, Any]) -> None:
        """Set the given live settings; the others keep their values."""
        if settings:
            pairs = [part for name, value in settings.items() for part in (name, json.dumps(value))]
            await self._call(self._redis.hset(self._key("settings"), items=pairs))

    @property
    def _ttl_ms(self) -> int:
        return round(self.ttl_s * 1000)

    def _key(self, *parts: str) -> str:
        return ":".join((f"outrider:{{{self.cluster}}}", *parts))

    async def _eval(self, script: str, keys: list[str], args: list[str | int]) -> Any:
        return await self._call(self._redis.eval(script, len(keys), *keys, *args))

    async def _call(self, call: Awaitable[Any]) -> Any:
        # redis-py waits with asyncio.wait_for, which in Python 3.11 may swallow a cancellation or turn it into an error
        # of the connection. Whoever cancelled us must see it.
        task = asyncio.current_task()
        cancelled_before = task.cancelling() if task is not None else 0
        try:
            async with asyncio.timeout(self.timeout_s):
                answer = await call
            if task is not None and task.cancelling() > cancelled_before:
                raise asyncio.CancelledError
            return answer
        except (RedisError, OSError, TimeoutError) as error:
            if task is not None and task.cancelling() > cancelled_before:
                raise asyncio.CancelledError from error
            reason = " ".join(str(error).split()) or f"no answer within {self.timeout_s:g} s"
            raise Unavailable(
                f"Redis at {self.redis} does not answer ({reason}); {self.redis.advice(error)}"
            ) from error


class Heartbeat:
    """Keeps one member announced from a thread of its own until ``stop``.

    For synchronous code, such as actors. When Redis cannot be reached the thread goes on trying: the member is missing
    from the registry meanwhile and comes back by itself.
    """

    def __init__(
        self,
        redis: str | RedisAccess,
        cluster: str,
        kind: Kind,
        member_id: str,
        record: Record,
        *,
        ttl_s: float = 3.0,
    ) -> None:
        self._redis = redis
        self._cluster = cluster
        self._kind = kind
        self._member_id = member_id
        self._record = record
        self._ttl_s = ttl_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self._started = threading.Event()
        self._announced = False
        self._error: OutriderError | None = None
        self._thread = threading.Thread(target=self._run, name=f"heartbeat-{kind}-{member_id}", daemon=True)

    def start(self) -> None:
        """Announce the member and keep it announced. Raises ``Unavailable`` if the first announcement fails."""
        self._thread.start()
        self._started.wait()
        if not self._announced:
            self._thread.join()
            raise self._error or Unavailable(f"{self._kind} {self._member_id} could not register; see the log")

    def update(self, record: Record) -> None:
        """Announce this record from the next beat on."""
        self._record = record

    def stop(self) -> None:
        """Withdraw the member and end the thread. Does not raise if Redis is gone: the record expires by itself."""
        if self._loop is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop ended by itself just now
                self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._beat())
        except OutriderError as error:
            self._error = error
        finally:
            self._started.set()

    async def _beat(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with Registry(self._redis, self._cluster, ttl_s=self._ttl_s) as registry:
            await registry.announce(self._kind, self._member_id, self._record)
            self._announced = True
            self._started.set()
            reachable = True
            while not await self._stopped_within(self._ttl_s / 3):
                try:
                    await registry.announce(self._kind, self._member_id, self._record)
                    reachable = True
                except Unavailable as error:
                    if reachable:
                        log.warning("%s %s is not registered for now: %s", self._kind, self._member_id, error)
                    reachable = False
            try:
                await registry.withdraw(self._kind, self._member_id)
            except Unavailable as error:
                log.info("%s %s leaves without a word: %s", self._kind, self._member_id, error)

    async def _stopped_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except TimeoutError:
            return False
        return True
