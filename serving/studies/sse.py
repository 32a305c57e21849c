"""Server-sent events: from bytes as they arrive to the data of each event.

Owns the framing only: lines, comments, events in several lines. What the data
means is left to the reader.
"""

from __future__ import annotations

# A chat chunk has some hundred bytes; a server that never ends an event is broken.
MAX_EVENT_BYTES = 16 * 2**20


class EventTooLongError(ValueError):
    """An event has grown past `MAX_EVENT_BYTES` without an end."""


class EventParser:
    """Collects bytes, split anywhere, into events.

    Takes lines that end in LF or CRLF; comments, and every field but `data`, are dropped.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> list[str]:
        """The data of the events that `chunk` completes, in order.

        Raises EventTooLongError, and UnicodeDecodeError where the data is not UTF-8.
        """
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
                self._size += len(line)
            elif not line and self._data:
                events.append(b"\n".join(self._data).decode())
                self._data, self._size = [], 0
        if self._size + len(self._rest) > MAX_EVENT_BYTES:
            raise EventTooLongError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return events
