"""Arithmetic only: AdamW, sums, moments and their codes, on the host and on the device."""
