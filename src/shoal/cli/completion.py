"""`shoal completion`: a script for bash, zsh or fish that completes commands, flags and choices.

    source <(shoal completion bash)             in ~/.bashrc
    source <(shoal completion zsh)              in ~/.zshrc, after compinit
    shoal completion fish | source              in ~/.config/fish/config.fish

What can be completed is written into the script: the shell does not start Python to complete.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shoal.cli.flags import Parser

_WITHOUT_FILES = ("completion",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """What may follow a command: its flags, words of its own, and the choices of flags."""

    flags: tuple[str, ...]
    actions: tuple[str, ...] = ()
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def make_parser() -> Parser:
    """Build the parser of `shoal completion`."""
    parser = Parser(
        prog="shoal completion",
        description=(__doc__ or "").partition("\n\n")[2],
    )
    parser.add_argument("shell", choices=sorted(SHELLS))
    return parser


def main(argv: Sequence[str]) -> int:
    """Print the script of a shell."""
    from shoal.cli.main import COMMANDS

    shell = make_parser().parse(argv).shell
    words = {
        name: words_of(importlib.import_module(f"shoal.cli.{name}").make_parser())
        for name in COMMANDS
    }
    print(SHELLS[shell](words, COMMANDS))
    return 0


def words_of(parser: argparse.ArgumentParser) -> Words:
    """Read a parser; flags of its actions count as its own."""
    flags: dict[str, tuple[str, ...]] = {}
    actions: list[str] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                actions.append(name)
                found = words_of(inner)
                flags |= {flag: found.choices.get(flag, ()) for flag in found.flags}
        elif action.option_strings:
            choices = tuple(map(str, action.choices or ()))
            flags |= dict.fromkeys(action.option_strings, choices)
        elif action.choices:
            actions += map(str, action.choices)
    return Words(
        flags=tuple(sorted(flags)),
        actions=tuple(actions),
        choices={flag: found for flag, found in flags.items() if found},
    )


def _bash(words: Mapping[str, Words], commands: Mapping[str, str]) -> str:
    cases = []
    for name, known in words.items():
        inner = "".join(
            f"        {flag}) _shoal_from {shlex.quote(' '.join(choices))}; return ;;\n"
            for flag, choices in known.choices.items()
        )
        if inner:
            inner = f'      case "$before" in\n{inner}      esac\n'
        own = " ".join((*known.flags, *known.actions))
        cases.append(f"    {name})\n{inner}      _shoal_from {shlex.quote(own)} ;;")
    body = "\n".join(cases)
    return f"""\
_shoal_from() {{
  COMPREPLY=($(compgen -W "$1" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
_shoal() {{
  local before="${{COMP_WORDS[COMP_CWORD-1]}}"
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    _shoal_from {shlex.quote(" ".join((*commands, "--help", "--version")))}
    return
  fi
  case "${{COMP_WORDS[1]}}" in
{body}
  esac
}}
complete -o default -F _shoal shoal"""


def _zsh(words: Mapping[str, Words], commands: Mapping[str, str]) -> str:
    return f"autoload -Uz bashcompinit && bashcompinit\n{_bash(words, commands)}"


def _fish(words: Mapping[str, Words], commands: Mapping[str, str]) -> str:
    start = "complete -c shoal"
    lines = [
        f"{start} -n __fish_use_subcommand -f -a {name} -d {shlex.quote(text)}"
        for name, text in commands.items()
    ]
    for name, known in words.items():
        inside = f"{start} -n '__fish_seen_subcommand_from {name}'"
        for flag in known.flags:
            kind = f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}"
            choices = known.choices.get(flag)
            more = f" -x -a {shlex.quote(' '.join(choices))}" if choices else ""
            lines.append(f"{inside} {kind}{more}")
        if known.actions:
            files = " -f" if name in _WITHOUT_FILES else ""
            lines.append(f"{inside}{files} -a {shlex.quote(' '.join(known.actions))}")
    return "\n".join(lines)


SHELLS: dict[str, Callable[[Mapping[str, Words], Mapping[str, str]], str]] = {
    "bash": _bash,
    "fish": _fish,
    "zsh": _zsh,
}
