"""Server-sent events out of a byte stream that may be cut anywhere.

Knows nothing of HTTP or of what the events mean.
"""

from __future__ import annotations

from collections.abc import Iterator


class EventParser:
    """Turns pieces of bytes into the data of complete events, by the rules of the HTML standard.

    Lines end with LF, CRLF or CR; an event ends with an empty line; several `data:` lines make one text joined by
    LF; comments and other fields are skipped. An event that its stream does not end is dropped.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._at_start = True

    def feed(self, piece: bytes) -> Iterator[str]:
        """Take the next bytes.

        Yields:
            The data of each event that is now complete.

        Raises:
            UnicodeDecodeError: the data is not UTF-8.
        """
        for line in self._lines(piece):
            if line:
                self._take(line)
            elif self._data:
                data, self._data = b"\n".join(self._data), []
                yield data.decode()

    def _lines(self, piece: bytes) -> list[bytes]:
        text = self._rest + piece
        if self._at_start and len(text) >= 3:
            text = text.removeprefix(b"\xef\xbb\xbf")
            self._at_start = False
        # A CR at the very end may be half of a CRLF: leave it for the next piece.
        held = b"\r" if text.endswith(b"\r") else b""
        lines = text[: len(text) - len(held)].replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = lines.pop() + held
        return lines

    def _take(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
