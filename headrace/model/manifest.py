"""What a checkpoint's bytes were when somebody vouched for them: the integrity manifest.

Every tensor is hashed in blocks of BLOCK_BYTES from its own start, the last one shorter. A sweep
reads rows that are cut differently for every size of slot, so one hash a tensor would have to be
carried from unit to unit, in order, and could not be told at all where part of a tensor stays in
memory. With blocks any piece can be checked by itself, whatever was read before it: the blocks that
reach beyond it are completed with a short read (see headrace.model.integrity). At 1 MiB a model of
70 GB has 2.2 MB of digests.

The file, headrace-manifest.json beside the weights, has the size of each file and of each tensor
its file, size and SHA-256 digests (one after the other, hexadecimal). Knows nothing of torch.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import CheckpointCorrupt, ConfigError, PeerUnavailable
from headrace.model.checkpoint import Checkpoint, TensorSpan
from headrace.sizes import format_bytes

FILE_NAME = "headrace-manifest.json"
BLOCK_BYTES = 1 << 20
"""Of a tensor, from its start, under one digest."""
DIGEST_BYTES = hashlib.sha256().digest_size

OnProgress = Callable[[int, int], None]
"""(bytes so far, bytes in all)."""

_FORMAT = {"version": 1, "hash": "sha256", "block_bytes": BLOCK_BYTES}
_BLOCKS_A_JOB = 64
_NUM_THREADS = 8
"""Reads in flight; each thread holds one block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """One tensor as it was."""

    file_name: str
    num_bytes: int
    digests: bytes
    """One a block, one after the other."""

    def digest(self, block: int) -> bytes:
        """Of one block."""
        return self.digests[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checkpoint as it was."""

    file_sizes: Mapping[str, int]
    """In bytes, by file name."""
    tensors: Mapping[str, TensorRecord]

    @classmethod
    def of(cls, checkpoint: Checkpoint, on_progress: OnProgress) -> "Manifest":
        """Read and hash every tensor, on several threads.

        Raises:
            CheckpointCorrupt: A file was changed meanwhile.
            PeerUnavailable: A file cannot be read.
        """
        fingerprint = checkpoint.fingerprint()
        digests = _digests(list(checkpoint.tensors.values()), on_progress)
        if checkpoint.fingerprint() != fingerprint:
            raise CheckpointCorrupt("the checkpoint was changed while it was read: try again")
        return cls(
            file_sizes={file.name: file.stat().st_size for file in checkpoint.files},
            tensors={
                name: TensorRecord(
                    file_name=span.file.name, num_bytes=span.num_bytes, digests=digests[name]
                )
                for name, span in checkpoint.tensors.items()
            },
        )

    @classmethod
    def load(cls, directory: Path) -> "Manifest | None":
        """The manifest of a directory; None if it has none.

        Raises:
            CheckpointCorrupt: It is damaged.
        """
        try:
            content = (directory / FILE_NAME).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise PeerUnavailable(
                f"{FILE_NAME} cannot be read: {os.strerror(error.errno or 0)}"
            ) from None
        try:
            manifest = _parsed(json.loads(content))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise CheckpointCorrupt(
                f"{FILE_NAME} is damaged: write it anew with `headrace models verify --update`, or "
                "delete it"
            ) from None
        return manifest

    @property
    def summary(self) -> str:
        """How much it is about."""
        num_bytes = sum(record.num_bytes for record in self.tensors.values())
        return (
            f"{len(self.tensors)} tensors in {len(self.file_sizes)} files, "
            f"{format_bytes(num_bytes)}"
        )

    def write(self, directory: Path) -> None:
        """Put it into a directory, all of it or nothing.

        Raises:
            ConfigError: The directory cannot be written.
        """
        content = json.dumps(_as_object(self), indent=1).encode()
        partial = directory / f".{FILE_NAME}.{secrets.token_hex(8)}"
        try:
            with partial.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(directory / FILE_NAME)
            _sync(directory)
        except OSError as error:
            raise ConfigError(f"cannot write {FILE_NAME} ({error.strerror})") from None
        finally:
            partial.unlink(missing_ok=True)

    def mismatches(self, checkpoint: Checkpoint) -> list[str]:
        """What is different without reading a weight: names, files and sizes, one line each."""
        spans = checkpoint.tensors
        return [
            *self._file_mismatches(checkpoint.directory),
            *(f"tensor {name} is missing" for name in self.tensors if name not in spans),
            *(
                mismatch
                for span in spans.values()
                if (mismatch := self._tensor_mismatch(span)) is not None
            ),
        ]

    def differences(self, directory: Path, on_progress: OnProgress) -> list[str]:
        """All that is different; reads every tensor that has the right size.

        Raises:
            PeerUnavailable: A file cannot be read.
        """
        try:
            checkpoint = Checkpoint.open(directory)
        except CheckpointCorrupt as error:
            return [*self._file_mismatches(directory), error.message]
        comparable = [
            span for span in checkpoint.tensors.values() if self._tensor_mismatch(span) is None
        ]
        digests = _digests(comparable, on_progress)
        return [
            *self.mismatches(checkpoint),
            *(
                different(span)
                for span in comparable
                if digests[span.name] != self.tensors[span.name].digests
            ),
        ]

    def _file_mismatches(self, directory: Path) -> Iterator[str]:
        for name, num_bytes in self.file_sizes.items():
            file = directory / name
            if not file.is_file():
                yield f"{name} is missing"
            elif file.stat().st_size != num_bytes:
                yield f"{name} has {file.stat().st_size:,} bytes instead of {num_bytes:,}"

    def _tensor_mismatch(self, span: TensorSpan) -> str | None:
        record = self.tensors.get(span.name)
        if record is None:
            return f"tensor {span.name} in {span.file.name} is new"
        if record.file_name != span.file.name:
            return f"tensor {span.name} is in {span.file.name} instead of {record.file_name}"
        if record.num_bytes != span.num_bytes:
            return (
                f"tensor {span.name} in {span.file.name} has {span.num_bytes:,} bytes instead of "
                f"{record.num_bytes:,}"
            )
        return None


def different(span: TensorSpan) -> str:
    """Says that a tensor has other bytes than the manifest knows."""
    return f"tensor {span.name} in {span.file.name} has other content"


def read_bytes(span: TensorSpan, begin: int, end: int) -> bytes:
    """The bytes of a tensor from begin up to end, counted from its start.

    Raises:
        CheckpointCorrupt: The file ends early.
        PeerUnavailable: It cannot be read.
    """
    try:
        with span.file.open("rb", buffering=0) as file:
            return _read(file.fileno(), span, begin, end)
    except OSError as error:
        raise PeerUnavailable(
            f"{span.file.name} cannot be read: {os.strerror(error.errno or 0)}"
        ) from None


def num_blocks(num_bytes: int) -> int:
    """How many digests a tensor of so many bytes has."""
    return -(-num_bytes // BLOCK_BYTES)


def _read(descriptor: int, span: TensorSpan, begin: int, end: int) -> bytes:
    parts = []
    while begin < end:
        part = os.pread(descriptor, end - begin, span.offset_bytes + begin)
        if not part:
            raise CheckpointCorrupt(f"{span.file.name} ends before tensor {span.name} does")
        parts.append(part)
        begin += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """Some blocks of one tensor."""

    span: TensorSpan
    begin: int
    end: int

    def run(self) -> bytes:
        """Their digests; one block is in memory at a time."""
        return b"".join(
            hashlib.sha256(
                read_bytes(self.span, begin, min(begin + BLOCK_BYTES, self.end))
            ).digest()
            for begin in range(self.begin, self.end, BLOCK_BYTES)
        )


def _digests(spans: Sequence[TensorSpan], on_progress: OnProgress) -> dict[str, bytes]:
    """The digests of each tensor, by name."""
    jobs = [job for span in spans for job in _jobs(span)]
    total = sum(span.num_bytes for span in spans)
    digests = {span.name: b"" for span in spans}
    done = 0
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="hasher") as pool:
        for job, part in zip(jobs, pool.map(_Job.run, jobs), strict=True):
            digests[job.span.name] += part
            done += job.end - job.begin
            on_progress(done, total)
    return digests


def _jobs(span: TensorSpan) -> Iterator[_Job]:
    step = _BLOCKS_A_JOB * BLOCK_BYTES
    for begin in range(0, span.num_bytes, step):
        yield _Job(span=span, begin=begin, end=min(begin + step, span.num_bytes))


def _as_object(manifest: Manifest) -> dict[str, Any]:
    return {
        **_FORMAT,
        "files": {name: {"num_bytes": size} for name, size in manifest.file_sizes.items()},
        "tensors": {
            name: {
                "file": record.file_name,
                "num_bytes": record.num_bytes,
                "blocks": record.digests.hex(),
            }
            for name, record in manifest.tensors.items()
        },
    }


def _parsed(content: Any) -> Manifest:
    """Raises ValueError, KeyError, TypeError or AttributeError where it is not a manifest."""
    if {name: content[name] for name in _FORMAT} != _FORMAT:
        raise ValueError("another format")
    return Manifest(
        file_sizes={name: _size(entry["num_bytes"]) for name, entry in content["files"].items()},
        tensors={name: _record(entry) for name, entry in content["tensors"].items()},
    )


def _record(entry: Any) -> TensorRecord:
    record = TensorRecord(
        file_name=str(entry["file"]),
        num_bytes=_size(entry["num_bytes"]),
        digests=bytes.fromhex(entry["blocks"]),
    )
    if len(record.digests) != num_blocks(record.num_bytes) * DIGEST_BYTES:
        raise ValueError("digests are missing")
    return record


def _size(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("no size")
    return value


def _sync(directory: Path) -> None:
    """Bring the rename to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
