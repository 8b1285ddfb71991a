"""Streams, slots and copies between host and device."""
