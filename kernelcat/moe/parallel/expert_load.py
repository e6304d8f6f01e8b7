"""How many assignments each expert has served, counted on the device."""

from __future__ import annotations

import numpy as np
import torch

from kernelcat.moe.model import Decoder
from kernelcat.moe.parallel.expert_layer import ARRIVED, NUM_SERVED, PLACES, StepCounts
from kernelcat.moe.parallel.expert_placement import Counts
from kernelcat.moe.weights import ExpertShare

ALIGNED_COLUMNS = 4
"""Each row of int32 begins at 16 bytes, as kernels ask."""


class ExpertLoad:
    """Counts of the experts that a rank holds, and where the experts of all ranks are.

    The offsets of rows that come to a rank are added up on the device, at the end of the step that
    uses them. So counting is one small addition in a step (one more in a layer that is computed in
    halves), and reading waits for no step. Tokens that were added to fill a size are not counted.

    Attributes
    ----------
    layers : experts of the layers that have some, by argument name; the tensors of `PLACES`,
        `ARRIVED` and `NUM_SERVED` are added here
    counts : of all layers, for `DividedExperts`
    expert_in : (layers, places) the expert in each place
    """

    def __init__(self, model: Decoder, share: ExpertShare, can_move: bool) -> None:
        found = (getattr(layer, "experts", None) for layer in model.layers)
        self.layers: list[dict[str, torch.Tensor]] = [experts for experts in found if experts]
        self._local = len(self.layers[0]["w1"])
        experts, device = self._local * share.ranks, model.device
        self._held = slice(share.rank * self._local, (share.rank + 1) * self._local)
        shape = len(self.layers), experts
        self.expert_in: Counts = np.broadcast_to(np.arange(experts), shape).copy()
        self._counted = np.zeros(shape, np.int64)
        width = self._local + 1
        columns = -(-width // ALIGNED_COLUMNS) * ALIGNED_COLUMNS
        self.counts = StepCounts(
            torch.zeros(shape[0], columns, dtype=torch.int32, device=device),
            torch.zeros(shape[0], columns, dtype=torch.int64, device=device),
        )
        for i, layer in enumerate(self.layers):
            layer[ARRIVED] = self.counts.arrived[i, :width]
            layer[NUM_SERVED] = self.counts.num_served[i, :width]
            if can_move:
                layer[PLACES] = torch.arange(experts, dtype=torch.int32, device=device)

    def by_place(self) -> Counts:
        """(layers, local) assignments that the places of this rank have served so far.

        They count from the start, or from the layer's last `place`.
        """
        return np.diff(self.counts.num_served.cpu().numpy()[:, : self._local + 1])

    def by_expert(self) -> Counts:
        """(layers, experts) assignments that this rank has served since its start."""
        counts = self._counted.copy()
        held = self.expert_in[:, self._held]
        np.put_along_axis(
            counts, held, np.take_along_axis(counts, held, 1) + self.by_place(), axis=1
        )
        return counts

    def place(self, layer: int, sources: Counts) -> int:
        """Each place of a layer has got the expert in place ``sources[p]``; no step is in flight.

        Returns how many experts came to this rank or changed places within it.
        """
        self._counted[layer] = self.by_expert()[layer]
        self.counts.num_served[layer].zero_()
        self.expert_in[layer] = self.expert_in[layer][sources]
        places = np.argsort(self.expert_in[layer]).astype(np.int32)
        self.layers[layer][PLACES].copy_(torch.from_numpy(places))
        return int((sources != np.arange(len(sources)))[self._held].sum())
