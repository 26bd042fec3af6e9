"""The factor of losses in fp16."""

from dataclasses import asdict

from shoal.train.scale import LossScale


def test_only_fp16_is_scaled():
    for precision in ("auto", "bf16", "fp32"):
        scale = LossScale.for_precision(precision)
        assert scale.factor == 1
        assert not scale.can_shrink
        assert scale.grown() == scale


def test_it_shrinks_at_once_and_grows_slowly_within_bounds():
    scale = LossScale.for_precision("fp16")
    first = scale.factor
    assert scale.shrunk().factor == first / 2
    for _ in range(999):
        scale = scale.grown()
    assert scale.factor == first
    assert scale.grown().factor == 2 * first
    assert scale.shrunk().good_steps == 0
    for _ in range(60):
        scale = scale.shrunk() if scale.can_shrink else scale
    assert scale.factor == 1
    for _ in range(50_000):
        scale = scale.grown()
    assert scale.factor == 2**24


def test_it_comes_back_as_it_was():
    scale = LossScale.for_precision("fp16").grown()
    assert LossScale(**asdict(scale)) == scale
