"""The `shoal` command.

In: command lines. Out: calls of the library, text for people, exit codes for machines.
"""
