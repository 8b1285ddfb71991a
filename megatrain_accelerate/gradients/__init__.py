"""Gradients on their way from autograd to the store."""
