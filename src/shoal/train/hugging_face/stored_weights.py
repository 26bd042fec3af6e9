"""The weights in a local Hugging Face folder, under the names that a model has for them today.

Files may hold older names, or pieces of what is one tensor now (experts, for example):
`transformers` knows how to make the model's tensors of them. Here it is done for a few tensors at
a time, so that nobody holds the whole model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shoal.checkpoint.hugging_face import open_weights
from shoal.errors import CheckpointError, UsageError
from shoal.train.hugging_face.adapters import adapted_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class StoredWeights:
    """Tensors of a folder, read when they are asked for."""

    def __init__(self, folder: Path, slices: dict[str, Any], model: PreTrainedModel) -> None:
        self.folder = folder
        self._slices = slices
        self._model = model
        # Of each first name in the model: what is stored for it, and how it becomes the tensor.
        self._sources: dict[str, list[tuple[str, str | None]]] = defaultdict(list)
        self._converters: dict[str, Any] = {}
        self._match()

    @property
    def example(self) -> str:
        """The name of some tensor in the files."""
        return min(self._slices, default="nothing")

    def values(self, names: Set[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield those of the named tensors that the files hold."""
        for name in sorted(names & self._sources.keys()):
            for made, value in self._made(name):
                if made in names:
                    yield made, value

    def check(self) -> None:
        """Raise a `UsageError` unless the files hold every tensor of the model, in its shape.

        Of tied parameters one suffices. Shapes of tensors that are made of pieces are seen later.
        """
        wanted = self._model.state_dict(keep_vars=True)
        found = {id(wanted[name]) for name in self._sources}
        tied = dict(self._model.all_tied_weights_keys)
        aliases = [*tied.items(), *((b, a) for a, b in tied.items())]
        found.update(id(wanted[a]) for a, b in aliases if a in wanted and b in self._sources)
        missing = [
            name
            for name, tensor in wanted.items()
            if id(tensor) not in found and adapted_name(name) is None
        ]
        if missing:
            raise self.missing_error(missing)
        for name, sources in self._sources.items():
            stored, pattern = sources[0]
            if pattern is None:
                shape = tuple(self._slices[stored].get_shape())
                self.check_shape(name, tuple(wanted[name].shape), shape)

    def check_shape(self, name: str, expected: tuple[int, ...], found: tuple[int, ...]) -> None:
        """Raise a `UsageError` unless a stored tensor has the shape that config.json says."""
        if found != expected:
            raise UsageError(
                f"--model: {name} has the shape {expected} by config.json, but "
                f"{found} in {self.folder}. The weights are of another model."
            )

    def missing_error(self, names: Sequence[str]) -> UsageError:
        """Make the error for tensors that the files do not hold."""
        more = f", and {len(names) - 1} more" if len(names) > 1 else ""
        return UsageError(
            f"--model: {self.folder} holds no {names[0]}{more}. Its files were written for "
            f"another config, or not as a whole; for example {self.example} is there."
        )

    def _made(self, first: str) -> Iterator[tuple[str, Tensor]]:
        sources = self._sources[first]
        if sources[0][1] is None:
            yield first, self._slices[sources[0][0]][...]
            return
        converter = deepcopy(self._converters[first])
        for stored, pattern in sources:
            converter.add_tensor(first, stored, pattern, self._slices[stored][...])
        made = converter.convert(first, model=self._model, config=self._model.config)
        for name, value in made.items():
            yield name, value[0] if isinstance(value, list) else value

    def _match(self) -> None:
        """Find out which tensors of the model are made of which stored ones."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            rename_source_key,
        )

        mapping = get_model_conversion_mapping(self._model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        by_pattern = {
            pattern: converter for converter in converters for pattern in converter.source_patterns
        }
        prefix, wanted = self._model.base_model_prefix, self._model.state_dict()
        for stored in sorted(self._slices, key=_natural):
            name, pattern = rename_source_key(stored, renamings, converters, prefix, wanted)
            if name not in wanted and stored in wanted:  # written with the names of today
                name, pattern = stored, None
            if name in wanted:
                self._sources[name].append((stored, pattern))
                if pattern is not None:
                    self._converters[name] = by_pattern[pattern]


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Sort experts.2 before experts.10: their order is that of the merged tensor."""
    return [
        (part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in name.split(".")
    ]


@contextmanager
def opened_weights(folder: Path | None, model: PreTrainedModel) -> Iterator[StoredWeights | None]:
    """Open the safetensors files of a folder; None for a model that begins with random values."""
    if folder is None:
        yield None
        return
    with ExitStack() as stack:
        try:
            slices = open_weights(folder, stack)
        except CheckpointError as error:
            raise UsageError(f"--model: {error}") from error
        yield StoredWeights(folder, slices, model)
