"""Which machines of a cluster may measure: those in the environment that most machines have."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

from kernelcat.store.measurement import canonical

GRACE_S = 20.0
"""Seconds after the first machine has started in which others still count for the majority."""
COMPARED = ("name", "sms", "power_w", "mig", "driver", "cuda", "compilers", "kernelcat")
"""Fields of an environment in which machines of one tune are equal."""


class Admission:
    """Compares the environments of GPUs, of which ``count`` start at about the same time.

    The environment that most of them have is the tune's. A GPU in another environment is refused,
    also one that starts later.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.started: list[Mapping[str, Any]] = []
        self.chosen: Mapping[str, Any] | None = None
        self.changed = threading.Condition()

    def refusal(self, environment: Mapping[str, Any]) -> str | None:
        """Why a GPU in ``environment`` may not measure, or None; waits for the majority."""
        mine = {name: environment.get(name) for name in COMPARED}
        with self.changed:
            self.started.append(mine)
            self.changed.notify_all()
            self.changed.wait_for(self._is_settled, timeout=GRACE_S)
            if self.chosen is None:
                ranked = Counter(map(canonical, self.started)).most_common(1)
                self.chosen = next(e for e in self.started if canonical(e) == ranked[0][0])
                self.changed.notify_all()
        differences = [
            f"{name} {mine[name]}, not {self.chosen[name]}"
            for name in COMPARED
            if mine[name] != self.chosen[name]
        ]
        return f"has {'; '.join(differences)}" if differences else None

    def leave(self) -> None:
        """One of the GPUs does not start, or must wait."""
        with self.changed:
            self.count -= 1
            self.changed.notify_all()

    def _is_settled(self) -> bool:
        return self.chosen is not None or len(self.started) >= self.count
