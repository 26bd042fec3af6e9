"""What the files of each format are called: names come out of files that somebody else may write.

A name becomes part of a path. So every name that a manifest, an index or DCP's metadata gives is
compared here before anything is opened, and `disk.open_regular` follows no link.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shoal.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class FileNames:
    """The names that a format gives its files: none of them leaves its folder."""

    pattern: re.Pattern[str]
    example: str

    def check(self, name: object) -> str:
        """Give the name back; raises CheckpointError unless it is one of the format."""
        if not isinstance(name, str) or not self.pattern.fullmatch(name):
            raise CheckpointError(f"expected a file name like {self.example}, got {name!r:.100}")
        return name


OURS = FileNames(
    pattern=re.compile(r"rank-[0-9]{5,9}\.safetensors"), example="rank-00000.safetensors"
)
DCP = FileNames(pattern=re.compile(r"__[0-9]+_[0-9]+\.distcp"), example="__0_0.distcp")
HUGGING_FACE = FileNames(
    pattern=re.compile(r"[\w.-]+\.safetensors"), example="model-00001-of-00002.safetensors"
)
