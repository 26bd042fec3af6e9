"""The transformer."""

import math

import torch

from shoal.train.config import ModelConfig
from shoal.train.model import Transformer, next_token_loss

CONFIG = ModelConfig(dim=32, layers=2, heads=2, context=16)


def make(**options):
    torch.manual_seed(0)
    return Transformer(CONFIG, **options)


def test_the_default_has_three_to_ten_million_parameters():
    with torch.device("meta"):
        model = Transformer(ModelConfig())
    assert 3e6 < sum(parameter.numel() for parameter in model.parameters()) < 10e6


def test_no_byte_sees_what_comes_after_it():
    model = make()
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[0, :10], after[0, :10], rtol=0, atol=0)
    assert not torch.allclose(before[0, 10:], after[0, 10:])


def test_positions_matter_only_relative_to_each_other():
    # A repeated byte attends to equal values, whatever the rotation: all positions score alike.
    scores = make()(torch.full((1, 16), 65))
    torch.testing.assert_close(scores[0, 0], scores[0, 15])
    # The order of different bytes, however, is seen.
    first = make()(torch.tensor([[1, 2, 3]]))[0, -1]
    second = make()(torch.tensor([[2, 1, 3]]))[0, -1]
    assert not torch.allclose(first, second)


def test_it_starts_out_knowing_nothing():
    tokens = torch.randint(256, (8, 17), generator=torch.Generator().manual_seed(1))
    loss = next_token_loss(make()(tokens[:, :-1]), tokens[:, 1:])
    assert abs(loss.item() - math.log(256)) < 0.3


def test_activation_checkpointing_changes_no_gradient():
    tokens = torch.randint(256, (2, 17))
    gradients = []
    for checkpointing in (False, True):
        model = make(activation_checkpointing=checkpointing)
        next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed, rtol=0, atol=0)


def test_activation_checkpointing_keeps_fewer_activations():
    def saved(checkpointing: bool) -> int:
        sizes: list[int] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        model = make(activation_checkpointing=checkpointing)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(torch.randint(256, (2, 16)))
        return sum(sizes)

    assert saved(True) < saved(False) / 2
