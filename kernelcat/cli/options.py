"""Options that several verbs share, and what their values choose."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import click

from kernelcat import catalog
from kernelcat.errors import InvalidArgument, Unsupported

if TYPE_CHECKING:
    from kernelcat.catalog.implementation import Implementation
    from kernelcat.runtime.device import Device

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
language = click.option("--language", help="Only this language: cuda, triton or cute.")
variant = click.option("--variant", help="Only this variant.")
problem_names = click.option(
    "--problem", "problems", multiple=True, help="Only this problem; repeatable."
)


def choose(entry: str, language: str | None, variant: str | None) -> list[Implementation]:
    """The implementations of ``entry`` that the options leave; an error when that is none."""
    catalog.entry(entry)
    found = catalog.in_language(entry, language) if language else catalog.implementations(entry)
    if variant:
        found = tuple(i for i in found if i.variant == variant)
    if not found:
        asked = "/".join(part for part in (entry, language, variant) if part)
        has = ", ".join(i.name for i in catalog.implementations(entry)) or "nothing installed"
        raise InvalidArgument(f"no implementation is called {asked}; there is: {has}")
    return list(found)


def open_device(mirrored: bool = False) -> Device:
    """The GPU, or Triton's interpreter where there is none."""
    from kernelcat.runtime import driver
    from kernelcat.runtime.device import CudaDevice, Interpreter, MirroredDevice

    if driver.count():
        return MirroredDevice() if mirrored else CudaDevice()
    os.environ["TRITON_INTERPRET"] = "1"
    return Interpreter()


def runnable(found: list[Implementation], device: Device) -> list[Implementation]:
    """Those this device can run at all."""
    from kernelcat.runtime.device import Interpreter

    if isinstance(device, Interpreter):
        runnable = [i for i in found if i.interpretable]
        where = "without a GPU only Triton kernels run (in its interpreter, which has no Gluon)"
    else:
        runnable = [i for i in found if i.serves(device.gpu.arch)]
        where = f"this GPU is {device.gpu.arch}"
    if not runnable:
        raise Unsupported(f"{', '.join(i.name for i in found)} cannot run here: {where}")
    return runnable


def seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text)
    if not match:
        raise InvalidArgument(f"budget {text!r} is not a time; write 90s, 10m or 1h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]
