"""Messages from rank 0 to the processes that follow it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernelcat.moe.engine.sampling import Choices
    from kernelcat.moe.engine.settings import EngineSettings
    from kernelcat.moe.engine.step_sizes import Size
    from kernelcat.moe.source import ModelSource


@dataclass(frozen=True)
class Join:
    """The first message: be rank ``rank`` of the model ``source``; ranks meet at ``path``."""

    source: ModelSource
    rank: int
    path: Path


@dataclass(frozen=True)
class Build:
    """Build what runs the steps of an engine with these settings."""

    settings: EngineSettings


@dataclass(frozen=True)
class Launch:
    """Run a step.

    Attributes
    ----------
    index, size : of the step
    data : its arrays, as `StepBuffers.written` returned them
    choices : how tokens are chosen
    """

    index: int
    size: Size
    data: bytes
    choices: Choices


@dataclass(frozen=True)
class Close:
    """The engine is closed; the model stays."""


Message = Join | Build | Launch | Close
