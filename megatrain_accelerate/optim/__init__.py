"""The optimizers that step the host store: the fused AdamW, and any other on fp32 masters."""
