"""Whole models train compiled as they train eagerly."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from compile_compare import BACKEND, compare

VOCABULARY, WIDTH, LENGTH = 17, 16, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.mix(self.norms[0](x)).view(batch, length, 3, 2, width // 2)
        q, k, v = (part.transpose(1, 2) for part in parts.unbind(2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norms[1](x))


class Transformer(nn.Module):
    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten()), logits


class LowRank(nn.Module):
    """A frozen linear layer with a trained correction of low rank."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x)) * 0.5


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.cell = nn.LSTMCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        state: tuple[Tensor, Tensor] | None = None
        for x in self.embed(tokens).unbind(1):
            state = self.cell(x, state)
        assert state is not None
        return self.head(state[0]), state[1]


def tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (2, LENGTH))


def transformer() -> tuple[nn.Module, Tensor]:
    return Transformer(), tokens()


def checkpointed() -> tuple[nn.Module, Tensor]:
    return Transformer(checkpointed=True), tokens()


def low_rank() -> tuple[nn.Module, Tensor]:
    model = Transformer().requires_grad_(False)
    for block in model.blocks:
        assert isinstance(block, Block)
        block.out = LowRank(block.out)  # pyright: ignore[reportAttributeAccessIssue]
    return model, tokens()


def recurrent() -> tuple[nn.Module, Tensor]:
    return Recurrent(), tokens()


def convolutional() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )
    return model, torch.randn(4, 3, 8, 8)


def convolutional_channels_last() -> tuple[nn.Module, Tensor]:
    model, images = convolutional()
    return (
        model.to(memory_format=torch.channels_last),  # pyright: ignore[reportCallIssue]
        images.contiguous(memory_format=torch.channels_last),
    )


def evaluated() -> tuple[nn.Module, Tensor]:
    model, images = convolutional()
    return model.eval(), images


def run(model: nn.Module, x: Tensor) -> Any:
    return model(x)


MODELS = [
    transformer,
    checkpointed,
    low_rank,
    recurrent,
    convolutional,
    convolutional_channels_last,
    evaluated,
]


@pytest.mark.parametrize("inputs", MODELS)
def test_forward_and_backward(inputs: Callable[[], Any]) -> None:
    compare(run, inputs, scenarios=("train", "infer"), steps=2)


def test_recurrent_layer() -> None:
    """The layer of torch, at which Dynamo breaks the graph."""

    class Layered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Linear(WIDTH, WIDTH)
            self.layer = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
            self.after = nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden, (last, _) = self.layer(self.before(x).tanh())
            return self.after(hidden).sin(), last * 2

    def inputs() -> tuple[nn.Module, Tensor]:
        return Layered(), torch.randn(2, 5, WIDTH)

    compare(run, inputs, scenarios=("train", "infer"), steps=2, fullgraph=False)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_recurrent_layer_in_a_graph(num_layers: int) -> None:
    """oneDNN's layer keeps what backward reads only while autograd records."""

    def steps(wrap: Callable[[nn.Module], Any]) -> list[Tensor]:
        torch.manual_seed(0)
        layer = nn.LSTM(WIDTH, WIDTH, num_layers, batch_first=True)
        call, x = wrap(layer), torch.randn(2, 5, WIDTH)
        for _ in range(2):
            hidden, (last, _) = call(x)
            (hidden.square().sum() + last.sum()).backward()
        return [p.grad for p in layer.parameters() if p.grad is not None]

    for left, right in zip(steps(aot_layer), steps(lambda layer: layer), strict=True):
        torch.testing.assert_close(left, right)


def aot_layer(layer: nn.Module) -> nn.Module:
    from shoal.aot import aot_module, nop

    return aot_module(layer, nop)


def trained(inputs: Callable[[], Any], wrap: Callable[[nn.Module], Any]) -> list[Tensor]:
    torch.manual_seed(0)
    model, x = inputs()
    call = wrap(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(3):
        out = call(x)
        (out[0] if isinstance(out, tuple) else out).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [t.detach() for t in (*model.parameters(), *model.buffers())]


@pytest.mark.parametrize("inputs", [transformer, checkpointed, low_rank, convolutional])
def test_a_few_steps(inputs: Callable[[], Any]) -> None:
    want = trained(inputs, lambda model: model)
    got = trained(inputs, lambda model: torch.compile(model, backend=BACKEND))
    for left, right in zip(want, got, strict=True):
        assert torch.equal(left, right)


SIZES = {"vocab_size": VOCABULARY, "use_cache": False}
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": (
        "LlamaConfig",
        {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2},
    ),
    "GPT2LMHeadModel": ("GPT2Config", {"n_embd": WIDTH, "n_layer": 2, "n_positions": LENGTH}),
    "BertForMaskedLM": (
        "BertConfig",
        {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2},
    ),
    "FalconForCausalLM": ("FalconConfig", {"hidden_size": WIDTH, "num_hidden_layers": 2}),
}
"""Models of transformers, with the classes and sizes of their configurations."""


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
@pytest.mark.parametrize("name", PUBLISHED)
def test_models_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    config_name, sizes = PUBLISHED[name]

    def inputs() -> tuple[nn.Module, Tensor]:
        config = getattr(transformers, config_name)(**SIZES, **sizes, num_attention_heads=2)
        return getattr(transformers, name)(config), tokens()

    def logits(model: Any, x: Tensor) -> Tensor:
        return model(x).logits

    compare(logits, inputs, scenarios=("train", "infer"), fullgraph=False)
