"""Calibration: which shape to probe next, the probe, the process it runs in, and the profile that comes of it."""
