"""Trainings whose ranks die, for tests of `shoal.survive`."""
