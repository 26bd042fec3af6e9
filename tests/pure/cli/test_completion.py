"""Shell completion, asked of a real bash."""

import shutil
import subprocess

import pytest

from shoal.cli.main import COMMANDS, main

needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")


@pytest.fixture(scope="module")
def script() -> str:
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["completion", "bash"]) == 0
    return out.getvalue()


def completed(script: str, *words: str) -> set[str]:
    """What bash offers for the last of the words."""
    quoted = " ".join(f"'{word}'" for word in words)
    program = f"""{script}
COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _shoal; printf '%s\\n' "${{COMPREPLY[@]}}" """
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return set(done.stdout.split())


@needs_bash
def test_commands_flags_and_choices(script):
    assert completed(script, "shoal", "") == {*COMMANDS, "--help", "--version"}
    assert completed(script, "shoal", "tr") == {"train"}
    assert completed(script, "shoal", "train", "--prec") == {"--precision"}
    assert completed(script, "shoal", "train", "--precision", "") == {
        "auto",
        "bf16",
        "fp16",
        "fp32",
    }
    assert "--ranks" in completed(script, "shoal", "train", "--steps", "3", "--ra")
    assert completed(script, "shoal", "checkpoint", "ver") == {"verify"}
    assert "--adapters" in completed(script, "shoal", "checkpoint", "export", "--ad")
    assert completed(script, "shoal", "completion", "z") == {"zsh"}
    assert completed(script, "shoal", "train", "/nowhere") == set()


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells(shell, capsys):
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert all(command in text for command in COMMANDS)
    assert "on-nonfinite" in text
