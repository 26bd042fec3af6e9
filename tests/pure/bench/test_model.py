import math

import pytest
import torch

from shoal.bench.cases import CASES
from shoal.bench.model import BenchTransformer, ModelShape

BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize(
    ("case", "hidden_dim", "num_parameters"),
    [("B1-8", 5376, 928_057_344), ("B5", 10752, 3_449_950_208)],
)
def test_parameter_counts(case: str, hidden_dim: int, num_parameters: int) -> None:
    shape = BY_NAME[case].shape
    with torch.device("meta"):
        model = BenchTransformer(shape)
    assert shape.hidden_dim == hidden_dim
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters


def test_narrow_models_have_a_feed_forward() -> None:
    assert ModelShape(dim=64, num_layers=1, num_heads=2, vocab_size=8).hidden_dim == 256


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match="does not split into 4 heads"):
        ModelShape(dim=6, num_layers=1, num_heads=4, vocab_size=8)


def test_model_learns_and_sees_no_future() -> None:
    torch.manual_seed(0)
    shape = ModelShape(dim=32, num_layers=2, num_heads=2, vocab_size=16)
    model = BenchTransformer(shape)
    tokens = torch.randint(16, (4, 9))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    before = model(inputs, targets)
    assert before.item() == pytest.approx(math.log(16), rel=0.2)

    # The loss of the first half does not depend on the inputs of the second.
    changed = inputs.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % 16
    first_half = torch.where(torch.arange(8) < 4, targets, -100)
    torch.testing.assert_close(model(inputs, first_half), model(changed, first_half))

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(20):
        model(inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model(inputs, targets).item() < before.item() / 2
