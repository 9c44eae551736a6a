"""StorageFault: what every reader of a prepared dataset raises, in words that all may see."""

from __future__ import annotations


class StorageFault(RuntimeError):
    """Storage did not return the bytes that the index names, whatever their content.

    The message is public and names no shard and no record; `private_detail` does, for the private
    log alone.
    """

    def __init__(self, message: str, private_detail: str = "") -> None:
        super().__init__(message)
        self.private_detail = private_detail

    def __reduce__(self) -> tuple[type[StorageFault], tuple[str, str]]:
        return type(self), (str(self), self.private_detail)
