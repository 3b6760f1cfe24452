"""Measurements, each `python -m crystalllm bench NAME`."""
