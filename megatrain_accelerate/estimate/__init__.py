"""``megatrain estimate``: what a training takes on a machine, from the model's configuration, by the plan's own cost model."""

USUAL_LENGTH = 4096
"""Tokens of a sequence, where nobody says how many."""
