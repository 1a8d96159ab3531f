"""New weights that arrive while the old ones still generate: a second set of tensors, verified as it fills.

Only a whole and faultless set is handed out, and then the engine changes over by taking another reference: nothing
is copied while generation is paused, and a set that never becomes whole leaves no trace.
"""

from __future__ import annotations

import torch

from rollout_server.cpu_engine.model_config import ModelConfig
from rollout_server.cpu_engine.weights import Weights, WeightsError


class Staging:
    """Filled by the thread of a group, asked by anybody. The first fault stays: it is what `finished` raises."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._weights = Weights(config, dtype)
        self._missing = set(self._weights.places)
        self._fault = ""
        self.empty = True

    @property
    def fault(self) -> str:
        """Why this set can never be used; empty: no reason so far."""
        return self._fault

    def fail(self, reason: str) -> None:
        """This set must not be used."""
        self._fault = self._fault or reason

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Take one tensor in any float dtype, under its Hugging Face name. Never raises: a fault is remembered.

        So the rest of a bucket is received in spite of it, and no other engine of the group waits in vain.
        """
        self.empty = False
        try:
            self._weights.put(name, tensor)
            if name in self._weights.places:
                # read back from where it lies now, so that nobody has to while generation is paused
                self._weights.checksum(name)
        except WeightsError as error:
            self.fail(str(error))
        self._missing.discard(name)

    def finished(self) -> Weights:
        """The whole set. Raises WeightsError."""
        if self._fault:
            raise WeightsError(self._fault)
        if self._missing:
            raise WeightsError(f"{len(self._missing)} tensor(s) were not sent, first {min(self._missing)!r}")
        return self._weights
