"""The machine: GPUs and their datasheets, the driver, launches, environment and telemetry.

This subpackage talks to hardware or describes hardware; it does not depend on tuning or proof.
"""
