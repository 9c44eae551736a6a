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


@contextmanager
def _ending_in_order() -> Iterator[None]:
    """SIGTERM unwinds the stack, so that what was started is ended too."""
    is_told = False

    def end(number: int, frame: object) -> None:
        nonlocal is_told
        is_told = True
        raise SystemExit  # of all that could be raised, Ray's waits let this through, as another

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except SystemExit:
        if not is_told:
            raise
        click.echo("Ended by SIGTERM: the same command resumes from the last checkpoint.", err=True)
        raise SystemExit(128 + signal.SIGTERM) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def readable(command: Callable[..., Any]) -> Callable[..., Any]:
    """A person's mistake gets a sentence, not a traceback (DP_PRETRAIN_TRACEBACK=1 shows it)."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            with _ending_in_order():
                return command(*args, **kwargs)
        except (ValueError, OSError, RuntimeError) as error:
            if os.environ.get("DP_PRETRAIN_TRACEBACK") == "1":
                raise
            raise click.ClickException(str(error)) from None

    return run
