"""The way of gradients from autograd to the store."""
