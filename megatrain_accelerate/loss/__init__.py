"""Computes the loss by tiles of tokens, so that the logits never exist as a whole."""
