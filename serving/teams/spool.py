"""What requests used, in local files until the database has it.

Owns these files: one set for each gateway process, in a folder that the gateways of a machine
share. A line is the whole state of one request and the last line of a request counts, so that
what a killed gateway leaves behind says what its requests had used until then; a lock, which the
kernel lets go of with the process, tells whose files are left behind. Leaves storing the records,
and when, to `ledger`.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import NamedTuple

from serving.teams.errors import StoreError

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 1024 * 1024
"""About as many bytes are read and stored at once."""
CUT_STATUS = 502
"""What a client saw of a gateway that was killed before it answered."""
_encode = json.JSONEncoder(separators=(",", ":")).encode


class UsageRecord(NamedTuple):
    """One request as far as it has come; the columns of the table `usage`, but for the cost."""

    id: str
    request_id: str
    at: float
    """When it came in, Unix time."""
    team: str
    key_id: str
    model: str
    variant: str
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    draft_tokens: int | None = None
    accepted_tokens: int | None = None
    ttft_s: float | None = None
    duration_s: float = 0.0
    status: int = 0
    """Of HTTP; 0: not answered yet."""
    complete: bool = False


class Segment(NamedTuple):
    """Records that go into the store together, and the file that they are in."""

    path: Path
    records: tuple[UsageRecord, ...]


class Spool:
    """The files of this process, for one thread; others may call `sync`, `pending` and `done`.

    What `append` has returned from is with the kernel: it outlives the process, kill -9
    included. A power cut loses what came after the last `sync`. Where the disk is full, records
    wait in memory for room, and are lost with the process.
    """

    def __init__(self, folder: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Raises StoreError where `folder` cannot be made or written to."""
        self._folder = folder
        self._segment_bytes = segment_bytes
        self.process = secrets.token_hex(8)
        self._ids = count()
        self._numbers = count()
        self._open: dict[str, bytes] = {}
        self._unwritten = bytearray()
        self._ended = 0
        self._full = False
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = _lock_new(folder, self.process)
            self._path, self._file = self._new_segment()
        except OSError as error:
            raise StoreError(
                f"{folder}: usage cannot be kept there ({error.strerror}); make the folder writable"
            ) from None
        self._size = self._carried = 0

    def new_id(self) -> str:
        """An id that no other request has, in any gateway."""
        return f"{self.process}-{next(self._ids)}"

    def append(self, record: UsageRecord, *, ended: bool) -> None:
        """Keep the state of a request, in place of the one before; `ended`: it is the last.

        Takes microseconds and raises nothing.
        """
        line = _line(record, ended)
        if ended:
            self._open.pop(record.id, None)
            self._ended += 1
        else:
            self._open[record.id] = line
        self._unwritten += line
        self._write()
        if self._size - self._carried > self._segment_bytes:
            self.seal()

    def seal(self) -> None:
        """Begin a new file, so that `pending` has all requests that have ended."""
        self._write()
        if not self._ended or self._unwritten:
            return
        carried = b"".join(self._open.values())
        try:
            path, file = self._new_segment()
        except OSError as error:
            self._told_full(error)
            return
        try:
            if os.write(file, carried) < len(carried):
                raise OSError("no room")
        except OSError as error:
            os.close(file)
            path.unlink()
            self._told_full(error)
            return
        os.close(self._file)
        self._path, self._file = path, file
        self._size = self._carried = len(carried)
        self._ended = 0
        self._full = False

    def sync(self) -> None:
        """Have the disk keep what was appended; blocks. Raises OSError."""
        for path in (self._path, self._folder):
            with _opened(path) as file:
                os.fsync(file)

    def pending(self) -> Generator[Segment, None, None]:
        """What is to be stored of this process, then of those that are no more.

        Of the latter, requests without an end are cut ones. Each segment comes again until it is
        `done`, which has to be before the next one is asked for. Blocks; raises OSError.
        """
        current = self._path
        for path in self._segments(self.process):
            if path == current:
                break
            yield Segment(path, tuple(r for r, ended in _read(path) if ended))
        for lock in sorted(self._folder.glob("*.lock")):
            if lock.stem != self.process:
                yield from self._left_behind(lock)

    def done(self, segment: Segment) -> None:
        """Let go of what is in the store for good."""
        segment.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Leave what is not stored yet to the next gateway."""
        self._write()
        os.close(self._file)
        if not (self._open or self._ended or self._unwritten):
            self._path.unlink()
        os.close(self._lock)

    def _left_behind(self, lock: Path) -> Iterator[Segment]:
        try:
            held = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield from _with_cut_ones(self._segments(lock.stem))
            if not self._segments(lock.stem):
                lock.unlink(missing_ok=True)
        except BlockingIOError:
            pass
        finally:
            os.close(held)

    def _segments(self, process: str) -> list[Path]:
        return sorted(self._folder.glob(f"{process}.*.jsonl"))

    def _new_segment(self) -> tuple[Path, int]:
        path = self._folder / f"{self.process}.{next(self._numbers):010}.jsonl"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        return path, os.open(path, flags, 0o600)

    def _write(self) -> None:
        """Write what there is; what the disk has no room for, maybe half a line, stays first."""
        try:
            while self._unwritten:
                written = os.write(self._file, self._unwritten)
                self._size += written
                del self._unwritten[:written]
        except OSError as error:
            self._told_full(error)

    def _told_full(self, error: OSError) -> None:
        if not self._full:
            logger.error("%s: usage waits in memory for room: %s", self._folder, error)
        self._full = True


def _line(record: UsageRecord, ended: bool) -> bytes:
    text = _encode([ended, record._asdict()]).encode()
    return b"%08x %b\n" % (zlib.crc32(text), text)


def _read(path: Path) -> Iterator[tuple[UsageRecord, bool]]:
    """The records of a file, and whether each is the last of its request."""
    damaged = 0
    with path.open("rb") as lines:
        for line in lines:
            # The last one of a process that was killed while it wrote.
            if not line.endswith(b"\n"):
                break
            if (found := _parse(line)) is None:
                damaged += 1
            else:
                yield found
    aside = path.with_suffix(".damaged")
    if damaged and not aside.exists():
        os.link(path, aside)
        logger.error("%d records cannot be read and are kept in %s", damaged, aside)


def _parse(line: bytes) -> tuple[UsageRecord, bool] | None:
    checksum, _, text = line.rstrip(b"\n").partition(b" ")
    if checksum != b"%08x" % zlib.crc32(text):
        return None
    ended, fields = json.loads(text)
    try:
        return UsageRecord(**fields), ended
    except TypeError:
        # Another version's.
        return None


def _with_cut_ones(paths: list[Path]) -> Iterator[Segment]:
    """The segments of a process that is no more; what has no end in any is in the last one."""
    unended: dict[str, UsageRecord] = {}
    for path in paths:
        records = []
        for record, ended in _read(path):
            unended.pop(record.id, None)
            if ended:
                records.append(record)
            else:
                unended[record.id] = record
        if path == paths[-1]:
            records += [
                record._replace(status=record.status or CUT_STATUS, complete=False)
                for record in unended.values()
            ]
        yield Segment(path, tuple(records))


def _lock_new(folder: Path, process: str) -> int:
    """A lock file that nobody sees unlocked while this process lives."""
    hidden = folder / f"{process}.new"
    lock = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    hidden.rename(folder / f"{process}.lock")
    return lock


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)
