"""The streaming engine: slots, prefetch, layers in autograd's graph, gradient offload."""
