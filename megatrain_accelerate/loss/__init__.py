"""The loss by tiles of tokens: logits that never exist whole."""
