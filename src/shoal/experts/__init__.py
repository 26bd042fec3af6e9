"""Mixtures of experts: tokens go to the ranks that hold their experts, and come back."""

from shoal.experts.clip import clip_grad_norm_
from shoal.experts.layer import Experts
from shoal.experts.parallel import shard_experts

__all__ = ["Experts", "clip_grad_norm_", "shard_experts"]
