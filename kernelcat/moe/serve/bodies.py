"""JSON bodies: known fields only, and what a body that is not valid is answered."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from kernelcat.moe.serve.errors import ApiError


class Body(BaseModel):
    """JSON with known fields only."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        return {name: value for name, value in content.items() if value is not None}

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """The request in ``body``.

        Raises
        ------
        ApiError
            The body is not JSON, or a field is unknown, missing or of another type.
        """
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            raise _refusal(error) from error


def _refusal(error: ValidationError) -> ApiError:
    """The answer to a body that is not valid."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    first = max(found, key=lambda item: len(item["loc"]))  # of a union the branch that fits best
    names = [str(part) for part in first["loc"] if not _is_branch(part)]
    match first["type"]:
        case "json_invalid":
            return ApiError(400, f"the body is not valid JSON: {first['msg']}", code="invalid_json")
        case "extra_forbidden":
            message = f"unrecognized request argument: {'.'.join(names)}"
        case "missing":
            message = f"you must provide {'.'.join(names)}"
        case _:
            message = f"{'.'.join(names)}: {first['msg']}" if names else first["msg"]
    return ApiError(400, message, param=names[0] if names else None)


def _is_branch(part: int | str) -> bool:
    """Whether a part of a place is not in the JSON, but names a branch of a union."""
    return isinstance(part, str) and (part in ("str", "NamedTool") or "[" in part)
