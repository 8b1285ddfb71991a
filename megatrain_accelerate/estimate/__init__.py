"""``megatrain estimate`` predicts memory and speed of a training from a model's configuration by the plan's own cost model."""

USUAL_LENGTH = 4096
"""Tokens of a sequence if ``--length`` isn't given."""
