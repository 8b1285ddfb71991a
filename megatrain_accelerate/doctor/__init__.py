"""``megatrain doctor`` checks whether this machine can train, what will limit it, and how to mend that."""
