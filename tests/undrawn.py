"""Trainings of tests leave the picture of their curves empty: drawing takes longer than most of them train."""

from types import SimpleNamespace

from megagraph import train

train.plots = SimpleNamespace(curves=lambda runs, path: path.touch())
