"""Where a dataset is kept: a folder behind a URL, seen through fsspec.

What differs between stores is here and nowhere else: how a file appears whole or not at all, which checksum the store
knows, which of its errors pass by themselves, and what a user can do about the others. Nothing is cached: each listing
is what the store says at that moment.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import hashlib
import posixpath
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import xxhash

from eyas.shards.errors import ShardError
from eyas.shards.ledger import SHARDS_FOLDER, SealedShard
from eyas.taps.errors import EyasError, UsageError

BLOCK_BYTES = 8 << 20  # read, hashed and written at once
_PART_BYTES = 32 << 20  # of a multipart upload; S3 takes 10 000 parts of at least 5 MiB
_MAX_PARTS = 9_000


class RemoteError(EyasError):
    """A store could not do what it was asked. ``transient``: the same again may well succeed."""

    def __init__(self, message: str, *, transient: bool) -> None:
        super().__init__(message)
        self.transient = transient


class RemoteMissingError(RemoteError):
    """The file, or the bucket or repository around it, is not there."""


def open_store(url: str) -> Store:
    """The store behind ``url``: hf://datasets/..., s3://, gs://, file:// or a path. Connects to nothing yet.

    Raises UsageError for any other URL, EyasError where the package that speaks to it is missing.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        return FolderStore(Path(url))
    opener = STORES.get(scheme)
    if opener is None:
        raise UsageError(
            f"{url}: expected a path or a URL that begins with {', '.join(f'{name}://' for name in STORES)}"
        )
    if not rest.strip("/"):
        raise UsageError(f"{url}: names no folder")
    if ".." in rest.split("/") or rest.startswith("/") != (scheme == "file"):
        raise UsageError(f"{url}: expected {scheme}://{'/' if scheme == 'file' else ''}... without '..' in it")
    return opener(url.rstrip("/"), rest.rstrip("/"))


def proven(blocks: Iterator[bytes], entry: SealedShard, where: str) -> Iterator[bytes]:
    """Pass ``blocks`` on, the last one only once all of them are what ``entry`` says. Raises ShardError.

    So whoever writes them has not got a whole file before it is proven.
    """
    digest, num_bytes, held = xxhash.xxh3_64(), 0, b""
    for block in blocks:
        digest.update(block)
        num_bytes += len(block)
        if held:
            yield held
        held = block
    if num_bytes != entry.num_bytes:
        raise ShardError(Path(where), None, f"{num_bytes} bytes, and its ledger line says {entry.num_bytes}")
    if digest.hexdigest() != entry.xxh3:
        raise ShardError(Path(where), None, "its bytes are not those that its ledger line was written for: damaged")
    yield held


def _md5(content: bytes = b"") -> Any:
    return hashlib.md5(content, usedforsecurity=False)


class Store:
    """A folder of a file system that fsspec speaks to. Names are relative to it, with forward slashes.

    Every method raises RemoteError, RemoteMissingError among it. May be used by several threads.
    """

    publish_seconds = 10.0  # at least so long between two publications of ledgers
    folder: Path | None = None  # where the store is a local folder
    _etags = False  # whether it gives each file an ETag that may be its MD5
    _errors: tuple[type[Exception], ...] = (OSError,)  # what the file system raises
    _missing: tuple[type[Exception], ...] = (FileNotFoundError,)  # and among it, for a file that is not there

    def __init__(self, url: str, root: str, file_system: Any) -> None:
        self.url, self._root, self._fs = url, root, file_system

    def inside(self, folder: str) -> Store:
        """The store of ``folder`` in this one."""
        inner = copy.copy(self)
        inner.url, inner._root = f"{self.url}/{folder}", self._path(folder)
        return inner

    def where(self, name: str) -> str:
        """``name`` as messages give it."""
        return f"{self.url}/{name}"

    def sizes(self, folder: str = "") -> dict[str, int]:
        """The files right in ``folder``: name to bytes. Folders are listed with a slash behind; none is no error."""
        path = self._path(folder)
        with self._faults(folder or "."):
            try:
                listed = self._list(path)
            except self._missing:
                return {}
        found = {}
        for one in listed:
            if one["name"].rstrip("/").lstrip("/") == path.rstrip("/").lstrip("/"):
                continue  # a marker object for the folder itself
            name = posixpath.basename(one["name"].rstrip("/"))
            found[name + "/" * (one["type"] == "directory")] = int(one["size"] or 0)
        return found

    def read(self, name: str) -> bytes | None:
        """The whole of a small file; None where it is not there."""
        try:
            return b"".join(self.blocks(name))
        except RemoteMissingError:
            return None

    def blocks(self, name: str) -> Iterator[bytes]:
        """The bytes of a file, in order."""
        with contextlib.ExitStack() as stack:
            with self._faults(name):
                file = stack.enter_context(self._open(self._path(name)))
            while True:
                with self._faults(name):
                    block: bytes = file.read(BLOCK_BYTES)
                if not block:
                    return
                yield block

    def put_shard(self, entry: SealedShard, path: Path, blocks: Iterator[bytes]) -> None:
        """Store the shard whose bytes are ``blocks`` (and the file ``path``): whole or not at all.

        It is proven to be what ``entry`` says before it can be seen. Raises ShardError where it is not.
        """
        name = f"{SHARDS_FOLDER}/{entry.shard}"
        checksum = self._write_stream(name, proven(blocks, entry, str(path)), entry.num_bytes)
        with self._faults(name):
            info = self._fs.info(self._path(name))
        if info["size"] != entry.num_bytes:
            raise RemoteError(
                f"{self.where(name)}: stored as {info['size']} bytes instead of {entry.num_bytes}", transient=True
            )
        self._compare(entry, info, checksum)

    def publish(self, files: Mapping[str, bytes], shards: Collection[str] = ()) -> None:
        """Write ``files``, in that order, each replaced in one step. ``shards``: those put before that they name."""
        for name, content in files.items():
            with self._faults(name):
                self._fs.pipe_file(self._path(name), content)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _list(self, path: str) -> list[dict[str, Any]]:
        self._fs.invalidate_cache()
        listed: list[dict[str, Any]] = self._fs.ls(path, detail=True)
        return listed

    def _open(self, path: str) -> Any:
        return self._fs.open(path, "rb", block_size=BLOCK_BYTES, cache_type="none")

    def _write_stream(self, name: str, blocks: Iterator[bytes], num_bytes: int) -> str | None:
        """Write a file that appears at the end of ``blocks``; returns the MD5 that S3 has as its ETag."""
        part_bytes = max(_PART_BYTES, -(-num_bytes // _MAX_PARTS >> 20 << 20))
        with self._faults(name):
            if num_bytes <= part_bytes:
                content = b"".join(blocks)
                self._fs.pipe_file(self._path(name), content)
                return _md5(content).hexdigest() if self._etags else None
            part, num_part, digests = _md5(), 0, []
            file = self._fs.open(self._path(name), "wb", block_size=part_bytes, autocommit=False)
            try:
                for block in blocks:
                    file.write(block)  # which sends what it has as a part, once that is part_bytes or more
                    if self._etags:
                        part.update(block)
                        num_part += len(block)
                        if num_part >= part_bytes:
                            digests.append(part.digest())
                            part, num_part = _md5(), 0
                file.close()
            except BaseException:
                file.closed = True  # or its finalizer would write what there is
                with contextlib.suppress(*self._errors):
                    file.discard()
                raise
            file.commit()
        if not self._etags:
            return None
        digests += [part.digest()] * (num_part > 0)
        return f"{_md5(b''.join(digests)).hexdigest()}-{len(digests)}"

    def _compare(self, entry: SealedShard, info: Mapping[str, Any], checksum: str | None) -> None:
        """Compare what was written with the checksum that the store knows. Raises RemoteError."""

    def _transient(self, error: Exception) -> bool:
        """Whether the same again may succeed."""
        lasting = (errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EACCES, errno.ENAMETOOLONG, errno.EMSGSIZE,
                   errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENOTDIR, errno.EISDIR)  # fmt: skip
        if isinstance(error, ConnectionError | TimeoutError):
            return True
        return (
            not isinstance(error, PermissionError | FileNotFoundError) and getattr(error, "errno", None) not in lasting
        )

    def _mend(self, error: Exception) -> str:
        """What the user can do about an error that lasts; empty where nothing is known."""
        return ""

    @contextlib.contextmanager
    def _faults(self, name: str) -> Iterator[None]:
        """Turn the file system's errors into RemoteError."""
        try:
            yield
        except EyasError:
            raise
        except self._errors as error:
            said = str(error).strip().splitlines()
            what = f"{self.where(name)}: {type(error).__name__}: {said[0] if said else 'no reason given'}"
            if self._transient(error):
                raise RemoteError(what, transient=True) from error
            kind = RemoteMissingError if isinstance(error, self._missing) else RemoteError
            raise kind(what + self._mend(error), transient=False) from error


class FolderStore(Store):
    """A local folder, to read from. What is written into one goes through the ledger's own code (transfer.py)."""

    def __init__(self, folder: Path) -> None:
        from fsspec.implementations.local import LocalFileSystem

        super().__init__(str(folder), str(folder.absolute()), LocalFileSystem())
        self.folder = folder

    def inside(self, folder: str) -> FolderStore:
        assert self.folder is not None
        return FolderStore(self.folder / folder)

    def _transient(self, error: Exception) -> bool:
        return False


class S3Store(Store):
    """s3://bucket/prefix, by s3fs. Objects appear whole; S3 itself checks what each request carries."""

    _etags = True

    def __init__(self, url: str, root: str) -> None:
        try:
            import s3fs
            from aiohttp import ClientError as ConnectionFault
            from botocore.exceptions import BotoCoreError, ClientError
        except ImportError as error:
            raise EyasError(f"{url}: s3:// needs s3fs, the extra `s3`: pip install 'eyas[s3]' ({error})") from error
        import asyncio

        self._errors = (OSError, BotoCoreError, ClientError, ConnectionFault, asyncio.TimeoutError)
        # Instances are made anew: one that is cached keeps the event loop and the credentials of its first use.
        super().__init__(url, root, s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True))

    def _compare(self, entry: SealedShard, info: Mapping[str, Any], checksum: str | None) -> None:
        """An ETag is the MD5 of what was stored, or, of several parts, of their MD5s; under some encryptions it is not.

        So one that differs proves nothing yet: the object is read back, and its bytes decide.
        """
        etag = str(info.get("ETag", "")).strip('"')
        if etag == checksum or len(etag) != len(checksum or ""):
            return
        name = f"{SHARDS_FOLDER}/{entry.shard}"
        try:
            for _ in proven(self.blocks(name), entry, self.where(name)):
                pass
        except ShardError as error:
            raise RemoteError(f"{self.where(name)}: stored with other bytes: {error.what}", transient=True) from error
        self._etags = False  # it would be read back each time

    def _transient(self, error: Exception) -> bool:
        from botocore.exceptions import BotoCoreError, HTTPClientError, ResponseStreamingError

        if isinstance(error, BotoCoreError):  # of the others, most are about credentials and configuration
            return isinstance(error, HTTPClientError | ResponseStreamingError)
        return super()._transient(error)

    def _mend(self, error: Exception) -> str:
        from botocore.exceptions import BotoCoreError

        if isinstance(error, BotoCoreError | PermissionError):
            return (
                ". S3 credentials are looked for as by the AWS command line: AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, and AWS_ENDPOINT_URL for a store that is not Amazon's; a "
                "public bucket is read with FSSPEC_S3_ANON=true. Listing, reading and writing must be allowed"
            )
        if isinstance(error, FileNotFoundError):
            return f". Is there a bucket {self._root.partition('/')[0]}? Make it with: aws s3 mb s3://BUCKET"
        return ""


class GcsStore(Store):
    """gs://bucket/prefix, by gcsfs, which compares the MD5 of what it wrote with Google's. Objects appear whole."""

    def __init__(self, url: str, root: str) -> None:
        try:
            import gcsfs
            from aiohttp import ClientError
            from gcsfs.retry import ChecksumError, HttpError
            from google.auth.exceptions import GoogleAuthError, TransportError
            from requests.exceptions import RequestException
        except ImportError as error:
            raise EyasError(f"{url}: gs:// needs gcsfs, the extra `gs`: pip install 'eyas[gs]' ({error})") from error
        import asyncio

        self._errors = (OSError, HttpError, ChecksumError, ClientError, GoogleAuthError, RequestException,
                        asyncio.TimeoutError, ValueError, RuntimeError)  # fmt: skip
        self._auth_error, self._auth_transport_error = GoogleAuthError, TransportError
        super().__init__(
            url,
            root,
            gcsfs.GCSFileSystem(consistency="md5", use_listings_cache=False, skip_instance_cache=True),
        )

    def _transient(self, error: Exception) -> bool:
        code = getattr(error, "code", None)
        if isinstance(code, int):
            return code >= 500 or code in (408, 429)
        if isinstance(error, self._auth_error):
            return isinstance(error, self._auth_transport_error)
        if isinstance(error, ValueError) or str(error).startswith("Forbidden"):  # gcsfs has 400 and 403 so
            return False
        return super()._transient(error)

    def _mend(self, error: Exception) -> str:
        if isinstance(error, FileNotFoundError):
            return f". Is there a bucket {self._root.partition('/')[0]}? Make it with: gcloud storage buckets create"
        return (
            ". Google's credentials are looked for by gcsfs: gcloud auth application-default login, or "
            "GOOGLE_APPLICATION_CREDENTIALS=key.json; a public bucket is read with FSSPEC_GS_TOKEN=anon. Listing, "
            "reading and writing must be allowed"
        )


class HubStore(Store):
    """hf://datasets/user/name[@revision][/folder], read by HfFileSystem, written by commits.

    A commit for each file would run into the hub's limits, and commits at once into each other. So shards are sent
    ahead, which nobody sees, and appear in one commit with the ledgers that name them.
    """

    publish_seconds = 60.0  # the hub takes about 128 commits an hour

    def __init__(self, url: str, root: str) -> None:
        from huggingface_hub import HfApi, HfFileSystem
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

        kind, _, rest = root.partition("/")
        if kind != "datasets" or len(rest.split("/")) < 2:
            raise UsageError(f"{url}: expected hf://datasets/USER/NAME, with a folder behind it or without")
        user, name, *folder = rest.split("/")
        name, _, revision = name.partition("@")
        self._repo = f"{user}/{name}"
        self._revision = unquote(revision) or None
        self._prefix = "".join(f"{part}/" for part in folder)
        # HTTPError of the client in use, httpx or another. RuntimeError is what hf_xet raises.
        transport = next(base for base in HfHubHTTPError.__mro__[1:] if not issubclass(OSError, base))
        self._errors = (OSError, transport, EntryNotFoundError, RuntimeError, ValueError)
        self._missing = (FileNotFoundError, EntryNotFoundError)
        super().__init__(url, root, HfFileSystem(skip_instance_cache=True))
        self._api = HfApi()
        self._sent: dict[str, Any] = {}  # shard to its part of the commit to come

    def inside(self, folder: str) -> Store:
        return HubStore(f"{self.url}/{folder}", self._path(folder))

    def _list(self, path: str) -> list[dict[str, Any]]:
        self._fs.invalidate_cache()
        # A repository that is not there is no empty folder: say so now, not once a shard has been sent.
        self._api.repo_info(self._repo, repo_type="dataset", revision=self._revision)
        return super()._list(path)

    def _open(self, path: str) -> Any:
        return self._fs.open(path, "rb", block_size=0, cache_type="none")  # one request, read as it comes

    def put_shard(self, entry: SealedShard, path: Path, blocks: Iterator[bytes]) -> None:
        from huggingface_hub import CommitOperationAdd

        for _ in proven(blocks, entry, str(path)):  # the hub's own checksum must be known before the first byte goes
            pass
        name = f"{SHARDS_FOLDER}/{entry.shard}"
        with self._faults(name):
            addition = CommitOperationAdd(path_in_repo=self._prefix + name, path_or_fileobj=str(path))
            self._api.preupload_lfs_files(
                self._repo, [addition], repo_type="dataset", revision=self._revision, num_threads=1
            )
        self._sent[entry.shard] = addition

    def publish(self, files: Mapping[str, bytes], shards: Collection[str] = ()) -> None:
        from huggingface_hub import CommitOperationAdd

        additions = [self._sent[shard] for shard in shards]
        additions += [
            CommitOperationAdd(path_in_repo=self._prefix + name, path_or_fileobj=content)
            for name, content in files.items()
        ]
        message = f"eyas upload: {len(shards)} shards" if shards else f"eyas upload: {', '.join(files)}"
        with self._faults(next(iter(files))):
            self._api.create_commit(
                self._repo, additions, repo_type="dataset", revision=self._revision, commit_message=message
            )
        for shard in shards:
            del self._sent[shard]

    def _transient(self, error: Exception) -> bool:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status is not None:
            return status >= 500 or status in (408, 409, 412, 429)
        return not isinstance(error, ValueError) and super()._transient(error)

    def _mend(self, error: Exception) -> str:
        return (
            f". The repository must be there and your token may read (for an upload: write) it: hf auth login, and "
            f"hf repos create {self._repo} --repo-type dataset --private"
        )


STORES: dict[str, Callable[[str, str], Store]] = {
    "hf": HubStore,
    "s3": S3Store,
    "gs": GcsStore,
    "file": lambda url, path: FolderStore(Path(unquote(path))),
}
