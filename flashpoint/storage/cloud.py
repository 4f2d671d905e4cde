"""`CloudStore`: a bucket of S3, or of what speaks its protocol, or of Google Cloud, through obstore.

Credentials and endpoints come from where obstore looks for them: ``AWS_*`` and ``GOOGLE_*`` variables, and the
metadata services of the clouds. What obstore retries is not our concern; what it gives up is a `StorageError`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

from flashpoint.errors import CheckpointNotFoundError, ConfigError, FlashpointError, StorageError
from flashpoint.storage.store import Stored

_AT_ONCE: Final = 2  # parts of one object on their way: with the one in the making, what memory a drain takes
_RETRIES: Final = 3


class CloudStore:
    """Objects of a bucket below one prefix.

    Args:
        url: ``s3://bucket/prefix`` or ``gs://bucket/prefix``.
        timeout_s: longest that one request may take.
    """

    def __init__(self, url: str, *, timeout_s: float) -> None:
        try:
            import obstore
            import obstore.store
            from obstore.exceptions import BaseError
        except ImportError as error:
            raise ConfigError(
                f"storage={url!r} needs obstore, which is not here ({error}): pip install 'flashpoint[storage]'"
            ) from None
        self.url = url.rstrip("/")
        self._obstore: Any = obstore
        self._failures: tuple[type[Exception], ...] = (BaseError, OSError)
        options: dict[str, Any] = {"timeout": timedelta(seconds=timeout_s)}
        options["connect_timeout"] = timedelta(seconds=min(timeout_s, 10.0))
        if _is_plain_http():
            options["allow_http"] = True
        retries: dict[str, Any] = {"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=timeout_s)}
        try:
            from_url: Any = obstore.store.from_url
            self._store = from_url(self.url, client_options=options, retry_config=retries)
        except Exception as error:  # whatever is wrong with the URL or the environment
            raise ConfigError(f"storage={url!r} cannot be opened: {_summary(error)}") from None

    def folders(self, under: str = "") -> list[str]:
        found = self._list(under)["common_prefixes"]
        return sorted(path.rstrip("/").rpartition("/")[2] for path in found)

    def files(self, under: str) -> dict[str, Stored]:
        return {meta["path"].rpartition("/")[2]: _stored(meta) for meta in self._list(under)["objects"]}

    def _list(self, under: str) -> Any:
        with self._errors("listing", under):
            return self._obstore.list_with_delimiter(self._store, under or None)

    def head(self, name: str) -> Stored | None:
        with self._errors("looking at", name):
            try:
                return _stored(self._obstore.head(self._store, name))
            except FileNotFoundError:
                return None

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        with self._errors("reading", name):
            try:
                if end is not None:
                    return bytes(self._obstore.get_range(self._store, name, start=begin, end=end))
                options = {"range": {"offset": begin}} if begin else None
                return bytes(self._obstore.get(self._store, name, options=options).bytes())
            except FileNotFoundError:
                raise CheckpointNotFoundError(f"there is no {name} in {self.url}") from None

    def write(self, name: str, data: bytes) -> None:
        with self._errors("writing", name):
            self._obstore.put(self._store, name, data, use_multipart=len(data) > 64 << 20)

    def write_parts(self, name: str, parts: Iterable[bytes], part_bytes: int) -> None:
        with self._errors("writing", name):
            self._obstore.put(self._store, name, iter(parts), chunk_size=part_bytes, max_concurrency=_AT_ONCE)

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            with self._errors("deleting", name):
                try:
                    self._obstore.delete(self._store, name)
                except FileNotFoundError:
                    continue

    @contextmanager
    def _errors(self, doing: str, name: str) -> Iterator[None]:
        try:
            yield
        except FlashpointError:
            raise
        except self._failures as error:
            raise StorageError(f"{doing} {self.url}/{name} failed: {_summary(error)}") from error


def _is_plain_http() -> bool:
    """Whether the environment names an endpoint without TLS, as that of a server in the same rack may be."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    return any(os.environ.get(name, "").startswith("http://") for name in names)


def _stored(meta: Any) -> Stored:
    return Stored(meta["size"], meta["e_tag"] or meta["last_modified"].isoformat())


def _summary(error: Exception) -> str:
    """What obstore says, and the server's own word for it, without the structures that it prints below."""
    code = re.search(r"<Code>(\w{1,100})</Code>", str(error))
    return str(error).partition("\n")[0].partition(": <?xml")[0][:500] + (f": {code[1]}" if code else "")
