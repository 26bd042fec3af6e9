"""Which releases of torch are refused or warned of, without loading one."""

import subprocess
import sys
from unittest.mock import patch

import pytest

from shoal import _requirements


@pytest.mark.parametrize("found", ["2.11.0", "2.12.1+cu130", "2.13.0rc7", "2.13.0+cpu", "source"])
def test_releases_that_are_tested(found: str) -> None:
    with patch.object(_requirements, "version", lambda _: found):
        _requirements.check_torch()


@pytest.mark.parametrize("found", ["1.13.1", "2.4.0", "2.10.0+cu128"])
def test_releases_that_are_too_old(found: str) -> None:
    words = (
        rf"torch 2\.11 to 2\.13, found {found.replace('+', '.')}.*pip install 'torch>=2\.11,<2\.14'"
    )
    with patch.object(_requirements, "version", lambda _: found):
        with pytest.raises(ImportError, match=words):
            _requirements.check_torch()


@pytest.mark.parametrize("found", ["2.14.0.dev20261101", "3.0.0"])
def test_releases_that_are_newer(found: str) -> None:
    with patch.object(_requirements, "version", lambda _: found):
        with pytest.warns(RuntimeWarning, match="tested on torch"):
            _requirements.check_torch()


def test_importing_shoal_does_not_load_torch() -> None:
    code = "import shoal, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
