"""Saving checkpoints and fp32 weights, which are complete or absent."""
