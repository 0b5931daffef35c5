"""Modules that misbehave when they are imported, for workers of tests."""
