"""Hooks into Accelerate and Transformers; the only place that knows their internals."""
