"""Replay: when the calls of thousands of ranks start and end, computed ahead of real time."""
