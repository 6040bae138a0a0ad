"""API keys: who may call, whose cache it is, and how much one key may use.

Holds  a key is compared in constant time with all that there are, and stands in no log: what names
       it is a digest.
Used   by `call`, at the beginning and at the end of each.
"""

from __future__ import annotations

import math
import secrets
import time
from collections import deque
from hashlib import blake2b
from typing import Literal

from structgen.server.config import ServerConfig
from structgen.server.errors import ApiError

_MINUTE = 60.0


class _Account:
    """What one key has used lately."""

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.running = 0
        self.began: deque[float] = deque()  # when each request of the last minute came
        self.spent: deque[tuple[float, int]] = deque()  # tokens of the last minute

    def forget(self, now: float) -> None:
        """Drop what is older than a minute."""
        while self.began and self.began[0] <= now - _MINUTE:
            self.began.popleft()
        while self.spent and self.spent[0][0] <= now - _MINUTE:
            self.spent.popleft()


class Holder:
    """Whoever holds a key, for one call.

    tenant   names the key in caches and logs, "" where there are no keys
    """

    def __init__(self, account: _Account, config: ServerConfig) -> None:
        self._account, self._config = account, config
        self._begun = False
        self.tenant = account.tenant

    def begin(self) -> None:
        """Its call begins. Raises `ApiError`: 429 for a key that is at a limit."""
        if self.tenant:
            self._check_limits()
            self._account.began.append(time.monotonic())
        self._account.running += 1
        self._begun = True

    def leave(self, tokens: int) -> None:
        """The call has ended, and cost so many tokens."""
        if not self._begun:
            return
        self._account.running -= 1
        if tokens and self.tenant:
            self._account.spent.append((time.monotonic(), tokens))

    def _check_limits(self) -> None:
        account, config, now = self._account, self._config, time.monotonic()
        account.forget(now)
        most = config.key_concurrency
        if most is not None and account.running >= most:
            raise _limited("requests of this key at once", account.running, most, 1)
        most = config.key_requests
        if most is not None and (count := len(account.began)) >= most:
            rest = account.began[0] + _MINUTE - now
            raise _limited("requests of this key in a minute", count, most, rest)
        used, most = sum(tokens for _, tokens in account.spent), config.key_tokens
        if most is not None and used >= most:
            rest = account.spent[0][0] + _MINUTE - now
            raise _limited("tokens of this key in a minute", used, most, rest)


class Keys:
    """The keys of one server."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._users = {key.encode(): _Account(_digest(key)) for key in config.api_keys}
        admins = {key.encode(): _Account(_digest(key)) for key in config.admin_keys}
        # A key of both kinds has one account: its limits hold for all that it does.
        self._admins = {key: self._users.get(key, account) for key, account in admins.items()}
        self._nobody = _Account("")

    def holder(
        self, authorization: str | None, access: Literal["open", "user", "admin"]
    ) -> Holder | None:
        """Who makes a call; None for a route that is open to everybody.

        Raises `ApiError`: 401 for a key that is missing or wrong.
        """
        if access == "open":
            return None
        known = self._known(access)
        kind = "admin's API key" if known is self._admins else "API key"
        account = self._account(authorization, known, kind) if known else self._nobody
        return Holder(account, self._config)

    def _known(self, access: str) -> dict[bytes, _Account]:
        if access == "admin" and self._admins:
            return self._admins
        return {**self._users, **self._admins} if self._users else {}

    def _account(
        self, authorization: str | None, known: dict[bytes, _Account], kind: str
    ) -> _Account:
        scheme, _, given = (authorization or "").partition(" ")
        sent = given.strip().encode(errors="replace")
        found: _Account | None = None
        for key, account in known.items():  # all of them, whichever it is
            if secrets.compare_digest(key, sent):
                found = account
        if found is None or scheme.lower() != "bearer":
            said = f"the {kind} is wrong" if given else f"an {kind} is missing"
            raise ApiError(
                401, f"{said}; send it as `Authorization: Bearer KEY`", code="invalid_api_key"
            )
        return found


def _limited(what: str, count: int, most: int, seconds: float) -> ApiError:
    return ApiError(
        429,
        f"{what}: {count}, and {most} are allowed; send it again later",
        type_="rate_limit_error",
        code="rate_limit_exceeded",
        retry_after=max(1, math.ceil(seconds)),
    )


def _digest(key: str) -> str:
    return blake2b(key.encode(), digest_size=8).hexdigest()
