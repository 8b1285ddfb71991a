"""The streaming engine: slots, prefetch, the autograd node of a layer, gradient offload."""
