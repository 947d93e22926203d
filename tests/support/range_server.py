"""A file server on loopback that honours Range and can cut transfers short."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class RangeServer(ThreadingHTTPServer):
    """Serves one content at every path.

    Attributes:
        content: What it serves.
        cut_after_bytes: The next transfer ends after so many bytes; None sends all.
        honours_range: Whether a Range header is answered with 206.
        ranges: The Range headers received.
    """

    def __init__(self, content: bytes) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.content = content
        self.cut_after_bytes: int | None = None
        self.honours_range = True
        self.ranges: list[str] = []

    @property
    def url(self) -> str:
        """The URL of the content."""
        return f"http://127.0.0.1:{self.server_port}/file.whl"


class _Handler(BaseHTTPRequestHandler):
    server: RangeServer

    def do_GET(self) -> None:
        server = self.server
        asked = self.headers["Range"]
        server.ranges.append(asked)
        first = int(asked.removeprefix("bytes=").rstrip("-")) if server.honours_range else 0
        body = server.content[first:]
        self.send_response(206 if server.honours_range else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        cut, server.cut_after_bytes = server.cut_after_bytes, None
        self.wfile.write(body[:cut])

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - inherited
        pass


@contextmanager
def range_server(content: bytes) -> Iterator[RangeServer]:
    """A running server; stopped at the end."""
    with RangeServer(content) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
