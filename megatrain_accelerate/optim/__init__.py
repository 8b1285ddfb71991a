"""The fused optimizer on the host and the threads that run it."""
