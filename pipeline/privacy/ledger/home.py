"""Storage that creates an object only if it is absent: lock, order and fence in one operation."""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import parse_qs, urlsplit

from pipeline.privacy.ledger.entries import LedgerStorageError

DOMAIN = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_NAME = re.compile(r"(\d{8})\.json")
_OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "az", "azure", "adl", "abfs", "abfss")
_T = TypeVar("_T")


class Home(Protocol):
    """Where the numbered objects of one domain lie."""

    def indices(self) -> list[int]:
        """Returns the sorted numbers of the objects there are."""

    def read(self, index: int) -> bytes:
        """Returns the bytes of object `index`."""

    def create(self, index: int, content: bytes) -> bool:
        """Makes object `index` durably, whole or not at all; False if another's is there."""

    def require_writable(self) -> None:
        """Raises LedgerStorageError unless objects can be created here, if absent only."""


def open_home(uri: str, domain: str) -> Home:
    """Returns the home of `domain` under `uri`: a path, or s3://, gs://, az:// by obstore."""
    scheme, separator, _ = uri.partition("://")
    if not separator or scheme == "file":
        return LocalHome(Path(uri.removeprefix("file://")).expanduser().absolute() / domain)
    if scheme in _OBJECT_STORES:
        return ObjectHome(_object_store(uri), domain)
    raise LedgerStorageError(
        f"ledger_home {uri} has the scheme {scheme}; a ledger needs storage that can create an "
        "object only if it is absent: a local or shared POSIX path, s3://, gs:// or az://. Set "
        "ledger_home to one of these; the data may stay where it is"
    )


def known_domains(uri: str) -> list[str]:
    """Returns the names of the domains that have a folder under `uri`, sorted.

    Raises:
        LedgerStorageError: the place cannot be listed.
    """
    home = open_home(uri, "")
    assert isinstance(home, LocalHome | ObjectHome)
    return sorted(name for name in home.siblings() if DOMAIN.fullmatch(name))


class HomeUpTo:
    """The first `num_entries` objects of a home, as they were then; nothing can be added."""

    def __init__(self, home: Home, num_entries: int) -> None:
        self._home, self._num_entries = home, num_entries

    def indices(self) -> list[int]:
        return [index for index in self._home.indices() if index < self._num_entries]

    def read(self, index: int) -> bytes:
        return self._home.read(index)

    def create(self, index: int, content: bytes) -> bool:
        raise LedgerStorageError("a ledger as it was cannot be written; use the ledger itself")

    def require_writable(self) -> None:
        self.create(0, b"")


class LocalHome:
    """A folder: temporary file, fsync, hard link (fails if the name is taken), folder fsync."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def indices(self) -> list[int]:
        try:
            names = os.listdir(self._folder)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._failed("list", error) from error
        return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))

    def siblings(self) -> list[str]:
        try:
            return [each.name for each in self._folder.iterdir() if each.is_dir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._failed("list", error) from error

    def read(self, index: int) -> bytes:
        try:
            return (self._folder / _name(index)).read_bytes()
        except OSError as error:
            raise self._failed("read", error) from error

    def create(self, index: int, content: bytes) -> bool:
        final = self._folder / _name(index)
        draft = self._folder / f".{_name(index)}.{secrets.token_hex(8)}.tmp"
        try:
            self._make_folder(self._folder)
            try:
                _write_durably(draft, content)
                is_ours = _link(draft, final, content)
            finally:
                draft.unlink(missing_ok=True)
            if is_ours:
                _sync_folder(self._folder)
            return is_ours
        except OSError as error:
            raise self._failed("write", error) from error

    def require_writable(self) -> None:
        probes = [self._folder / f".probe-{secrets.token_hex(8)}{end}" for end in ("", ".link")]
        try:
            self._make_folder(self._folder)
            try:
                _write_durably(probes[0], b"")
                os.link(*probes)
            finally:
                for probe in probes:
                    probe.unlink(missing_ok=True)
        except OSError as error:
            raise self._failed("write", error) from error

    def _make_folder(self, folder: Path) -> None:
        if folder.is_dir():
            return
        self._make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync_folder(folder.parent)

    def _failed(self, what: str, error: OSError) -> LedgerStorageError:
        remedy = "nothing was charged; free space or mend the permissions, then start again"
        if error.errno in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
            remedy = "this file system may lack hard links: set ledger_home to one that has them"
        return LedgerStorageError(
            f"cannot {what} the ledger in {self._folder}: {error.strerror or error}; {remedy}"
        )


class ObjectHome:
    """An object store, through obstore: conditional puts, proved to work before the first.

    Args:
        store: an obstore store.
        domain: prefix of the objects.
    """

    def __init__(self, store: Any, domain: str) -> None:
        self._store, self._domain = store, domain
        self._is_proved = False

    def indices(self) -> list[int]:
        def listed() -> list[int]:
            found = []
            for chunk in self._store.list(f"{self._domain}/"):
                for meta in chunk:
                    match = _NAME.fullmatch(meta["path"].rsplit("/", 1)[-1])
                    if match:
                        found.append(int(match[1]))
            return sorted(found)

        return self._guarded("list", listed)

    def siblings(self) -> list[str]:
        def listed() -> list[str]:
            prefixes = self._store.list_with_delimiter()["common_prefixes"]
            return [prefix.strip("/") for prefix in prefixes]

        return self._guarded("list", listed)

    def read(self, index: int) -> bytes:
        return self._guarded("read", lambda: bytes(self._store.get(self._path(index)).bytes()))

    def require_writable(self) -> None:
        if not self._is_proved:
            self._guarded("write", self._prove)
            self._is_proved = True

    def create(self, index: int, content: bytes) -> bool:
        self.require_writable()
        return self._guarded("write", lambda: self._create(self._path(index), content))

    def _create(self, path: str, content: bytes) -> bool:
        from obstore.exceptions import AlreadyExistsError  # noqa: PLC0415 - an extra

        try:
            self._store.put(path, content, mode="create", use_multipart=False)
        except AlreadyExistsError:
            # A put whose answer was lost is repeated by the client, and then meets itself.
            return bytes(self._store.get(path).bytes()) == content
        return True

    def _prove(self) -> None:
        """Raises unless the store refuses to create the same object twice."""
        probe = f"{self._domain}/.probe-{secrets.token_hex(8)}"
        try:
            is_refused = self._create(probe, b"first") and not self._create(probe, b"second")
        finally:
            self._store.delete(probe)
        if not is_refused:
            raise LedgerStorageError(
                f"the store of domain {self._domain} overwrites where it should create only if "
                "absent (conditional put), so that it cannot hold a ledger; set ledger_home to "
                "a POSIX path or to a store that honours If-None-Match"
            )

    def _path(self, index: int) -> str:
        return f"{self._domain}/{_name(index)}"

    def _guarded(self, what: str, call: Callable[[], _T]) -> _T:
        from obstore.exceptions import BaseError  # noqa: PLC0415 - an extra

        try:
            return call()
        except (BaseError, OSError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise LedgerStorageError(
                f"cannot {what} the ledger of domain {self._domain}: {reason}; check the "
                "address and credentials of ledger_home, then start again"
            ) from error


def _object_store(uri: str) -> Any:
    """Returns the obstore store of `uri`; pyarrow's query options for S3 are understood."""
    try:
        from obstore.store import from_url  # noqa: PLC0415 - an extra
    except ImportError:
        raise LedgerStorageError(
            f"ledger_home {uri} needs obstore; install it: pip install 'dp-pretrain[object-store]'"
        ) from None
    address, _, query = uri.partition("?")
    options = {name: values[-1] for name, values in parse_qs(query).items()}
    address = re.sub("^gcs://", "gs://", address)
    config: Any = {}
    client: Any = {}
    protocol = options.pop("scheme", "https")
    if "endpoint_override" in options:
        endpoint = options.pop("endpoint_override")
        config["endpoint"] = endpoint if "://" in endpoint else f"{protocol}://{endpoint}"
        client["allow_http"] = config["endpoint"].startswith("http://")
    for name in ("region", "access_key", "secret_key"):
        if name in options:
            config[_S3_OPTIONS[name]] = options.pop(name)
    options.pop("allow_bucket_creation", None)
    if options or (config and not urlsplit(address).scheme.startswith("s3")):
        raise LedgerStorageError(
            f"ledger_home {address} has options that are not known here: "
            f"{', '.join(sorted(options) or sorted(config))}; set them by the store's own "
            "environment variables instead"
        )
    try:
        return from_url(address, config=config or None, client_options=client or None)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise LedgerStorageError(f"ledger_home {address} cannot be opened: {reason}") from error


_S3_OPTIONS = {
    "region": "region",
    "access_key": "access_key_id",
    "secret_key": "secret_access_key",
}


def _name(index: int) -> str:
    return f"{index:08d}.json"


def _write_durably(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _link(draft: Path, final: Path, content: bytes) -> bool:
    try:
        os.link(draft, final)
    except FileExistsError:
        # Over NFS a link whose answer was lost is repeated, and then meets itself.
        return final.read_bytes() == content
    return True


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
