"""The terminal of commands and jobs: plain text, and sentences instead of tracebacks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import click
from rich.console import Console


def make_console() -> Console:
    """A console that shows text as it is: paths and log lines may hold square brackets."""
    return Console(highlight=False, soft_wrap=True, markup=False)


class Terminated(BaseException):
    """Somebody asked this process to end."""


@contextmanager
def _ending_in_order() -> Iterator[None]:
    """SIGTERM unwinds the stack, so that what was started is ended too."""

    def end(number: int, frame: object) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def readable(command: Callable[..., Any]) -> Callable[..., Any]:
    """A person's mistake gets a sentence, not a traceback (DP_PRETRAIN_TRACEBACK=1 shows it)."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            with _ending_in_order():
                return command(*args, **kwargs)
        except Terminated:
            click.echo(
                "Ended by SIGTERM: the same command goes on from the last checkpoint.", err=True
            )
            raise SystemExit(128 + signal.SIGTERM) from None
        except (ValueError, OSError, RuntimeError) as error:
            if os.environ.get("DP_PRETRAIN_TRACEBACK") == "1":
                raise
            raise click.ClickException(str(error)) from None

    return run
