"""Commands that end with their test."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from train_command import Command


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    commands: list[Command] = []

    def start_command(*arguments: str, **options) -> Command:
        commands.append(Command(tmp_path, *arguments, **options))
        return commands[-1]

    yield start_command
    for command in commands:
        if command.process.poll() is None:
            command.process.kill()
            command.process.communicate()
