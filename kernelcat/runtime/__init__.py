"""The machine: GPUs and their datasheets, the driver, launches, environment and telemetry.

Here belongs what talks to hardware, or describes it, and knows nothing of tuning or proof.
"""
