"""Untrusted bytes are decoded in a process that may die without taking anything else with it.

    prepare ── pipe ── keeper ── pipe ── worker
                 (never decodes)   (decodes; forked again by the keeper when it has died)

The keeper is started once a thread or Ray worker and has everything imported, so that a new worker
costs a fork and not seconds. A batch whose worker dies, or takes too long, is tried again one
picture at a time: the guilty one is left out by its reason, the others stay.

Nothing of them is seen: their error streams are closed and no core is dumped, since both would tell
of single private pictures.
"""

from __future__ import annotations

import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pipeline.data.images import ImageError
from pipeline.data.prepare.conversion import ConversionRules, Converted, convert

MAX_SECONDS = 60.0
"""For one picture, and for one batch."""
MAX_GROWTH_BYTES = 8 * 2**30
"""Address space that a worker may take beside what it was forked with."""
CRASHED, TOO_SLOW = b"decoder_crashed", b"decoder_too_slow"

_KEEPER = "from pipeline.data.prepare.isolation import keep; keep()"
_LENGTH = struct.Struct("<Q")
_RULES = struct.Struct("<iiBI")
_FOUND = struct.Struct("<32s32sBQI")
_ANSWERED, _FAILED = b"\x01", b"\x00"


class IsolatedConverter:
    """Converts pictures in a process of its own; used by one thread at a time.

    Guarantees:
        1. Whatever the bytes do to the decoder, a call returns: a crash, an endless loop or a
           memory bomb costs the picture and not the batch (test_decoder_crashes).
    """

    def __init__(self) -> None:
        self._keeper: subprocess.Popen[bytes] | None = None

    def convert(
        self, contents: Sequence[bytes], rules: ConversionRules
    ) -> list[Converted | ImageError]:
        """What becomes of each: the stored form, or why there is none.

        Raises:
            OSError: the process cannot be started.
        """
        if not contents:
            return []
        answer = self._ask(_packed_request(contents, rules))
        if answer[:1] == _ANSWERED:
            return list(_unpacked_answer(answer[1:]))
        if len(contents) > 1:
            return [self.convert([content], rules)[0] for content in contents]
        return [ImageError(answer[1:].decode())]

    def close(self) -> None:
        """End the process."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None and keeper.stdin and keeper.stdout:
            with suppress(OSError):
                keeper.stdin.close()
            keeper.stdout.close()
            keeper.terminate()  # it may be waiting for a picture that takes long
            keeper.wait()

    def _ask(self, request: bytes) -> bytes:
        if self._keeper is None:
            self._keeper = _start_keeper()
        assert self._keeper.stdin and self._keeper.stdout
        try:
            _write_frame(self._keeper.stdin.fileno(), request)
            answer = _read_frame(self._keeper.stdout.fileno())
        except OSError:
            answer = None
        if answer is None:
            keeper = self._keeper
            self.close()
            raise OSError(
                f"the process that decodes images ended (exit code {keeper.returncode}); check "
                "this machine's memory, and that a new process can import pipeline.data.images"
            )
        return answer


_idle: list[IsolatedConverter] = []
_lock = threading.Lock()


@contextmanager
def isolated_converter() -> Iterator[IsolatedConverter]:
    """A converter that nobody else uses meanwhile; it is kept for the next who asks."""
    with _lock:
        converter = _idle.pop() if _idle else IsolatedConverter()
    try:
        yield converter
    except BaseException:  # in the middle of a request, perhaps
        converter.close()
        raise
    with _lock:
        _idle.append(converter)


def close_idle_converters() -> None:
    """End the processes that wait for pictures; they would end with this process anyway."""
    while _idle:
        with _lock:
            converter = _idle.pop()
        converter.close()


def _start_keeper() -> subprocess.Popen[bytes]:
    package_root = str(Path(__file__).parents[3])
    paths = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-c", _KEEPER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )


def keep() -> None:
    """The keeper: hands each request to the worker, and says what became of it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who asks
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    requests, answers = sys.stdin.fileno(), sys.stdout.fileno()
    worker = _Worker()
    try:
        while (request := _read_frame(requests)) is not None:
            _write_frame(answers, worker.answer(request))
    finally:
        worker.end()


class _Worker:
    """The keeper's side of the process that decodes."""

    def __init__(self) -> None:
        self._process: int | None = None
        self._requests = self._answers = -1

    def answer(self, request: bytes) -> bytes:
        if self._process is None:
            self._fork()
        deadline = time.monotonic() + MAX_SECONDS
        try:
            _write_frame(self._requests, request)
            found = _read_frame(self._answers, deadline)
        except TimeoutError:
            self.end()
            return _FAILED + TOO_SLOW
        except OSError:
            found = None
        if found is None:
            self.end()
            return _FAILED + CRASHED
        return _ANSWERED + found

    def end(self) -> None:
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        os.close(self._requests)
        os.close(self._answers)
        self._process = None

    def _fork(self) -> None:
        read_request, self._requests = os.pipe()
        self._answers, write_answer = os.pipe()
        process = os.fork()
        if process:
            os.close(read_request)
            os.close(write_answer)
            self._process = process
            return
        try:
            nothing = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(nothing, stream)
            os.close(self._requests)
            os.close(self._answers)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            _limit()
            while (request := _read_frame(read_request)) is not None:
                _write_frame(write_answer, _answer(request))
        finally:
            os._exit(0)


def _limit() -> None:
    """No core file, and an end to memory."""
    import resource  # noqa: PLC0415  not on every system

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MAX_GROWTH_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _answer(request: bytes) -> bytes:
    contents, rules = _unpacked_request(request)
    parts: list[bytes] = []
    for content in contents:
        try:
            found = convert(content, rules)
        except ImageError as error:
            parts.append(_packed_reason(error.reason))
        except (MemoryError, RuntimeError):  # torch tells of no memory by a RuntimeError
            parts.append(_packed_reason("out_of_memory"))
        else:
            parts.append(_packed_found(found))
    return b"".join(parts)


def _packed_request(contents: Sequence[bytes], rules: ConversionRules) -> bytes:
    head = _RULES.pack(
        rules.short_side, rules.jpeg_quality, rules.with_perceptual_hash, len(contents)
    )
    lengths = b"".join(_LENGTH.pack(len(content)) for content in contents)
    return head + lengths + b"".join(contents)


def _unpacked_request(request: bytes) -> tuple[list[bytes], ConversionRules]:
    short_side, quality, with_hash, num = _RULES.unpack_from(request)
    place = _RULES.size
    lengths = [_LENGTH.unpack_from(request, place + _LENGTH.size * n)[0] for n in range(num)]
    place += _LENGTH.size * num
    contents = []
    for length in lengths:
        contents.append(request[place : place + length])
        place += length
    rules = ConversionRules(
        short_side=short_side, jpeg_quality=quality, with_perceptual_hash=bool(with_hash)
    )
    return contents, rules


def _packed_found(found: Converted) -> bytes:
    has_hash = found.perceptual_hash is not None
    head = _FOUND.pack(
        found.source_digest,
        found.pixel_digest,
        has_hash,
        found.perceptual_hash or 0,
        len(found.stored),
    )
    return _ANSWERED + head + found.stored


def _packed_reason(reason: str) -> bytes:
    return _FAILED + bytes([len(reason)]) + reason.encode()


def _unpacked_answer(answer: bytes) -> Iterator[Converted | ImageError]:
    place = 0
    while place < len(answer):
        is_found = answer[place : place + 1] == _ANSWERED
        place += 1
        if not is_found:
            length = answer[place]
            yield ImageError(answer[place + 1 : place + 1 + length].decode())
            place += 1 + length
            continue
        source, pixels, has_hash, bits, length = _FOUND.unpack_from(answer, place)
        place += _FOUND.size
        yield Converted(
            source_digest=source,
            pixel_digest=pixels,
            perceptual_hash=bits if has_hash else None,
            stored=answer[place : place + length],
        )
        place += length


def _write_frame(stream: int, content: bytes) -> None:
    view = memoryview(_LENGTH.pack(len(content)) + content)
    while view:
        view = view[os.write(stream, view) :]


def _read_frame(stream: int, deadline: float | None = None) -> bytes | None:
    """The next frame; None where the other side is gone. Raises TimeoutError at the deadline."""
    head = _read(stream, _LENGTH.size, deadline)
    return None if head is None else _read(stream, _LENGTH.unpack(head)[0], deadline)


def _read(stream: int, size: int, deadline: float | None) -> bytes | None:
    parts: list[bytes] = []
    while size:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([stream], [], [], left)[0]:
                raise TimeoutError
        part = os.read(stream, min(size, 2**20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
