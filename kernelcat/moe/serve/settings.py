"""Settings of the server."""

from __future__ import annotations

from dataclasses import dataclass

from kernelcat.errors import InvalidArgument


@dataclass(frozen=True)
class Settings:
    """Settings of the server; limits of prompts and of the queue are the engine's `Limits`.

    Attributes
    ----------
    model : the name that requests give in ``model``
    host, port : where the server listens; port 0 for any free one
    api_keys : keys that clients may present; none for no authentication
    max_body : bytes of a request, at most
    grace : seconds for running requests after SIGTERM; those left get an error

    Raises
    ------
    InvalidArgument
        A value is out of range.
    """

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    max_body: int = 8 << 20
    grace: float = 30.0

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise InvalidArgument(f"port={self.port} must be from 0 to 65535")
        if self.max_body < 1 or self.grace < 0:
            raise InvalidArgument(
                f"max_body={self.max_body} must be positive, and grace={self.grace} not negative"
            )
        if not all(self.api_keys):
            raise InvalidArgument("an API key must not be empty")
