"""The terminal of commands and jobs: plain text, and sentences instead of tracebacks."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import click
from rich.console import Console


def make_console() -> Console:
    """A console that shows text as it is: paths and log lines may hold square brackets."""
    return Console(highlight=False, soft_wrap=True, markup=False)


def readable(command: Callable[..., Any]) -> Callable[..., Any]:
    """A person's mistake gets a sentence, not a traceback (DP_PRETRAIN_TRACEBACK=1 shows it)."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except (ValueError, OSError, RuntimeError) as error:
            if os.environ.get("DP_PRETRAIN_TRACEBACK") == "1":
                raise
            raise click.ClickException(str(error)) from None

    return run
