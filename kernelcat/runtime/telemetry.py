"""Telemetry of a GPU while it is measured: SM clock, power, temperature, throttle reasons."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from kernelcat.runtime import children

THROTTLES = {
    0x4: "power_cap",
    0x8: "hw_slowdown",
    0x20: "thermal",
    0x40: "hw_thermal",
    0x80: "power_brake",
}
"""Bits of NVML's clock-event reasons that mean that work was slowed (idle and application clocks
do not)."""


@dataclass(frozen=True)
class Reading:
    """One reading of the sensors: megahertz, watts, degrees Celsius, names of throttle reasons."""

    sm_clock_mhz: int
    max_clock_mhz: int
    power_w: float
    temperature_c: int
    throttle: tuple[str, ...] = ()


def summary(readings: Sequence[Reading]) -> dict[str, Any]:
    """Medians of a race's readings, and every throttle reason in them; empty for no readings."""
    if not readings:
        return {}
    reasons = {reason for reading in readings for reason in reading.throttle}
    return {
        "sm_clock_mhz": round(median(r.sm_clock_mhz for r in readings)),
        "power_w": round(median(r.power_w for r in readings), 1),
        "temperature_c": round(median(r.temperature_c for r in readings)),
        "throttle": sorted(reasons),
    }


def throttles(mask: int) -> tuple[str, ...]:
    """Names of the throttle reasons that are set in NVML's bit mask."""
    return tuple(name for bit, name in THROTTLES.items() if mask & bit)


class Nvml:
    """Readings through NVML in this process; each takes about 0.1 ms."""

    def __init__(self, pci_bus_id: str) -> None:
        from cuda.bindings import nvml

        nvml.init_v2()
        self.nvml = nvml
        self.handle = nvml.device_get_handle_by_pci_bus_id_v2(pci_bus_id)
        self.max_clock_mhz = int(nvml.device_get_max_clock_info(self.handle, nvml.ClockType.SM))

    def read(self) -> Reading | None:
        """The current reading."""
        nvml, handle = self.nvml, self.handle
        sensor = nvml.TemperatureSensors.TEMPERATURE_GPU
        return Reading(
            sm_clock_mhz=int(nvml.device_get_clock_info(handle, nvml.ClockType.SM)),
            max_clock_mhz=self.max_clock_mhz,
            power_w=nvml.device_get_power_usage(handle) / 1000,
            temperature_c=int(nvml.device_get_temperature_v(handle, sensor)),
            throttle=throttles(nvml.device_get_current_clocks_event_reasons(handle)),
        )


class Smi:
    """Readings of an ``nvidia-smi`` process, which reports every 100 ms."""

    FIELDS = (
        "clocks.sm,clocks.max.sm,power.draw,temperature.gpu,clocks_throttle_reasons.active"
    )  # fmt: skip

    def __init__(self, pci_bus_id: str) -> None:
        command = ["nvidia-smi", "-i", pci_bus_id, f"--query-gpu={self.FIELDS}",
                   "--format=csv,noheader,nounits", "-lms", "100"]  # fmt: skip
        self.latest: Reading | None = None
        self.process = children.start(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.thread.start()

    def _follow(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.latest = parse_smi(line) or self.latest

    def read(self) -> Reading | None:
        """The latest reading; None before the first."""
        return self.latest

    def close(self) -> None:
        """End the process."""
        children.stop(self.process)


def parse_smi(line: str) -> Reading | None:
    """The reading in a CSV line of ``nvidia-smi``; None where a field is not available (MIG)."""
    fields = [field.strip() for field in line.split(",")]
    try:
        clock, max_clock, power, celsius, reasons = fields
        return Reading(
            int(clock), int(max_clock), float(power), int(celsius), throttles(int(reasons, 16))
        )
    except ValueError:
        return None


class NoTelemetry:
    """The source for a device without sensors."""

    def read(self) -> Reading | None:
        """None."""
        return None


@contextmanager
def sampler(pci_bus_id: str | None) -> Iterator[Nvml | Smi | NoTelemetry]:
    """The best source of readings in this machine: NVML, ``nvidia-smi`` or none."""
    source = _source(pci_bus_id)
    try:
        yield source
    finally:
        if isinstance(source, Smi):
            source.close()


def _source(pci_bus_id: str | None) -> Nvml | Smi | NoTelemetry:
    if pci_bus_id is None:
        return NoTelemetry()
    try:
        source = Nvml(pci_bus_id)
        source.read()
        return source
    except Exception:  # cuda.bindings before 13.2 lacks NVML; a MIG slice has no clocks
        return Smi(pci_bus_id) if shutil.which("nvidia-smi") else NoTelemetry()
