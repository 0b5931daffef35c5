"""Samples into a slot and back: one copy, no intermediate stack."""
