"""``megatrain doctor``: whether this machine is fit for training, what will limit it, and how to mend that."""
