"""Muon for some matrices and AdamW for all other parameters, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from shoal.optim.adam import AdamW
from shoal.optim.muon import Muon


class MuonWithAdamW(Optimizer):
    """One list of groups and one state for both, so that schedules and checkpoints see one.

    The first group is Muon's, the others, given as AdamW takes them, are AdamW's. Muon's updates
    have the size of AdamW's (`match_rms_adamw`): one learning rate serves both.
    """

    def __init__(
        self,
        matrices: Sequence[Tensor],
        others: Sequence[Mapping[str, Any]],
        *,
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        mesh: DeviceMesh | None = None,
        **adamw: Any,
    ) -> None:
        self._parts: tuple[Muon, AdamW] = (
            Muon(
                matrices,
                lr=lr,
                momentum=momentum,
                weight_decay=weight_decay,
                adjust_lr_fn="match_rms_adamw",
                mesh=mesh,
            ),
            AdamW([dict(group) for group in others], lr=lr, **adamw),
        )
        groups = [group for part in self._parts for group in part.param_groups]
        super().__init__(groups, {})
        start = 0
        for part in self._parts:  # the same dicts, so that who changes one changes it for all
            end = start + len(part.param_groups)
            part.param_groups = self.param_groups[start:end]
            part.state = self.state
            start = end

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of both. Collective, as Muon's is."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See torch; both go on with what was loaded."""
        super().load_state_dict(state_dict)
        muon, adamw = self._parts
        muon.param_groups, adamw.param_groups = self.param_groups[:1], self.param_groups[1:]
        adamw._groups_known().clear()
        for part in self._parts:
            part.state = self.state
