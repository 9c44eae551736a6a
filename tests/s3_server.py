"""A tiny S3 server over a folder whose answers can be made to fail: for tests of storage faults."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

BUCKET = "bucket"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # a refused connection would be tried again a second later


class FaultyS3:
    """Serves `folder` as bucket BUCKET.

    Attributes:
        fault: what happens to a read of a tar: "", "503", "hang" or "reset".
        num_faults: how many more reads fail.
        reads: (name, number of bytes) of every answered read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fault, self.num_faults = "", 0
        self.reads: list[tuple[str, int]] = []
        self.is_over = threading.Event()
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), self._handler())
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def fails(self) -> bool:
        """Whether this read is one of those that fail."""
        with self._lock:
            self.num_faults -= 1
            return self.num_faults >= 0

    def close(self) -> None:
        self.is_over.set()
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        faulty = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_HEAD(self) -> None:
                self._answer(with_body=False)

            def do_GET(self) -> None:
                self._answer(with_body=True)

            def _answer(self, *, with_body: bool) -> None:
                name = self.path.partition("?")[0].removeprefix(f"/{BUCKET}").lstrip("/")
                file = faulty.folder / name
                if not name or not file.is_file():
                    self._send(404, b"", 0)
                    return
                content, status = file.read_bytes(), 200
                size = len(content)
                asked = self.headers.get("Range")
                if asked:
                    first, _, last = asked.removeprefix("bytes=").partition("-")
                    content, status = content[int(first) : int(last) + 1], 206
                if with_body and name.endswith(".tar") and faulty.fault and faulty.fails():
                    if faulty.fault == "503":
                        self._send(503, b"<Error><Code>SlowDown</Code></Error>", size)
                    elif faulty.fault == "hang":
                        faulty.is_over.wait(60)
                        self.close_connection = True
                    else:
                        self._send(status, content, size, cut=len(content) // 2)
                        with contextlib.suppress(OSError):
                            self.connection.shutdown(socket.SHUT_RDWR)
                        self.close_connection = True
                    return
                if with_body:
                    faulty.reads.append((name, len(content)))
                self._send(status, content, size, with_body=with_body)

            def _send(
                self,
                status: int,
                content: bytes,
                size: int,
                *,
                with_body: bool = True,
                cut: int | None = None,
            ) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                if status == 206:
                    self.send_header("Content-Range", f"bytes 0-{len(content) - 1}/{size}")
                self.end_headers()
                if with_body:
                    self.wfile.write(content[:cut])

        return Handler


@contextlib.contextmanager
def faulty_s3(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    """The server, and an environment by which pyarrow finds it at s3://bucket."""
    server = FaultyS3(folder)
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test-access-key",
        "AWS_SECRET_ACCESS_KEY": "test-secret-key",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    try:
        yield server
    finally:
        server.close()
