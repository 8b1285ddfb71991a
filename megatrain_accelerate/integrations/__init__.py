"""Hooks into Accelerate, Transformers, PEFT and TRL."""
