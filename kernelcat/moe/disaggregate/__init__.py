"""Disaggregation: an engine that reads prompts and one that writes, each on a GPU of its own.

`front` is an engine of two processes. The decode engine takes every request (`arrivals`): it
computes the prompt itself, or gives it pages and asks for them (`router`). The prefill engine
computes the prompt and the first token, and writes the pages into the decode engine's cache, layer
by layer while later layers are computed (`host_link`, `device_link`). The request goes on when its
first token has come, which is after its last page. `watch` finds a side that hangs.
"""
