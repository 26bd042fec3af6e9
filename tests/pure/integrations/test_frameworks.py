"""A framework that is missing or too old is named, with the command that installs it."""

import importlib.util
from unittest.mock import patch

import pytest

from shoal.integrations import frameworks
from shoal.integrations.frameworks import FrameworkError, require


def test_a_missing_framework() -> None:
    words = r"expected nosuchthing 1\.2 or newer, found none: pip install 'shoal\[hf\]'"
    with pytest.raises(FrameworkError, match=words):
        require("nosuchthing", (1, 2), "hf")


def test_an_old_framework() -> None:
    with patch.object(frameworks, "version", lambda _: "1.1.9"):
        with pytest.raises(FrameworkError, match=r"expected thing 1\.2 or newer, found 1\.1\.9"):
            require("thing", (1, 2), "hf")


@pytest.mark.parametrize("found", ["1.2.0", "1.10", "2.0.0.dev1", "source"])
def test_frameworks_that_are_new_enough(found: str) -> None:
    with patch.object(frameworks, "version", lambda _: found):
        require("thing", (1, 2), "hf")


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is not None, reason="it is installed")
def test_the_module_of_a_missing_framework_says_so() -> None:
    with pytest.raises(ImportError, match=r"expected accelerate .*pip install 'shoal\[hf\]'"):
        importlib.import_module("shoal.integrations.accelerate")
