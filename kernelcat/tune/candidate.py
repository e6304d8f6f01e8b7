"""Candidates of a tune: an implementation with a configuration, or a peer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kernelcat.catalog.implementation import LANGUAGES, Config, Implementation

PEER = "peer"


@dataclass(frozen=True)
class Candidate:
    """An implementation with a configuration; or a peer, which has no configuration.

    A peer has the language ``peer``. Peers race, but cannot win.
    """

    language: str
    variant: str
    config: Config = field(default_factory=Config)

    @staticmethod
    def of(implementation: Implementation, config: Config) -> Candidate:
        return Candidate(implementation.language, implementation.variant, config)

    @property
    def key(self) -> str:
        """A text by which candidates are sorted."""
        return json.dumps([self.language, self.variant, dict(self.config)])

    @property
    def is_peer(self) -> bool:
        return self.language == PEER

    def __str__(self) -> str:
        values = " ".join(f"{k}={v}" for k, v in self.config.items())
        return f"{self.language}/{self.variant}" + (f" {values}" if values else "")


def simplicity(
    candidate: Candidate,
    ranks: Mapping[tuple[str, str], int],
    defaults: Mapping[tuple[str, str], Config],
) -> tuple[Any, ...]:
    """Sort key that puts the simplest candidate first; decides ties.

    Compared are, in this order: the rank of the variant, whether the configuration is the default,
    the language, the name of the variant, the configuration. ``ranks`` and ``defaults`` have
    (language, variant) as keys.
    """
    owner = (candidate.language, candidate.variant)
    language = LANGUAGES.index(candidate.language) if candidate.language in LANGUAGES else 9
    is_tuned = defaults.get(owner) != candidate.config
    return (ranks.get(owner, 99), is_tuned, language, candidate.variant, candidate.config.key)
