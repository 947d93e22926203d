"""A resumable, verified download of one file. Knows nothing of what is in it."""

import hashlib
import os
import shutil
import ssl
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import certifi
import httpx

from headrace.errors import ConfigError

MAX_ATTEMPTS = 5
_CHUNK_BYTES = 1 << 16
_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """A file whose content is known in advance."""

    name: str
    num_bytes: int
    sha256: str


def download(
    file: RemoteFile,
    url: str,
    directory: Path,
    *,
    on_progress: Callable[[int, int], None],
    retry_wait_s: float = 1.0,
) -> Path:
    """Fetch a file, continuing where an earlier run stopped.

    Args:
        file: What to expect.
        url: An http, https or file URL of it.
        directory: Where it goes; until it is verified it is called NAME.part.
        on_progress: Called with (bytes so far, bytes in all).
        retry_wait_s: Pause before a broken transfer is continued; doubles each time.

    Returns:
        The verified file.

    Raises:
        ConfigError: The server cannot be reached or sends another content.
    """
    final = directory / file.name
    if final.exists():
        return final
    part = directory / f"{file.name}.part"
    if url.startswith("file:"):
        shutil.copyfile(urllib.request.url2pathname(urllib.parse.urlparse(url).path), part)
    else:
        _fetch_with_retries(file, url, part, on_progress, retry_wait_s)
    _verify(file, part)
    return part.rename(final)


def _fetch_with_retries(
    file: RemoteFile,
    url: str,
    part: Path,
    on_progress: Callable[[int, int], None],
    retry_wait_s: float,
) -> None:
    with httpx.Client(verify=_trust(), follow_redirects=True, timeout=_TIMEOUT_S) as client:
        for attempt in range(MAX_ATTEMPTS):
            try:
                _fetch_rest(client, file, url, part, on_progress)
                break
            except httpx.TransportError:
                if attempt == MAX_ATTEMPTS - 1:
                    raise ConfigError(
                        f"the download of {file.name} broke off: run the command again to go on "
                        "where it stopped"
                    ) from None
                time.sleep(retry_wait_s * 2**attempt)
            except httpx.HTTPStatusError as error:
                raise ConfigError(
                    f"the package index answered {error.response.status_code} for {file.name}: "
                    "check the index that pip is configured with"
                ) from None


def _fetch_rest(
    client: httpx.Client,
    file: RemoteFile,
    url: str,
    part: Path,
    on_progress: Callable[[int, int], None],
) -> None:
    num_bytes = part.stat().st_size if part.exists() else 0
    if num_bytes >= file.num_bytes:
        return
    headers = {"Range": f"bytes={num_bytes}-", "Accept-Encoding": "identity"}
    with client.stream("GET", url, headers=headers) as response:
        response.raise_for_status()
        if response.status_code != httpx.codes.PARTIAL_CONTENT:  # it sends all of it again
            num_bytes = 0
        with part.open("ab" if num_bytes else "wb") as output:
            for chunk in response.iter_raw(_CHUNK_BYTES):
                output.write(chunk)
                num_bytes += len(chunk)
                on_progress(num_bytes, file.num_bytes)


def _verify(file: RemoteFile, part: Path) -> None:
    with part.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest != file.sha256:
        part.unlink()
        raise ConfigError(
            f"{file.name} is not the expected file (sha256 {digest[:12]}.. instead of "
            f"{file.sha256[:12]}..): it was deleted; run the command again, and if it happens "
            "again check the index that pip is configured with"
        )


def _trust() -> ssl.SSLContext:
    """The system's certificates and the bundle that pip is told to use."""
    context = ssl.create_default_context()
    names = ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
    context.load_verify_locations(next(filter(None, map(os.environ.get, names)), certifi.where()))
    return context
