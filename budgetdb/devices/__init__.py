"""Devices: what is there, how much of it is free, a limit that holds, and the peak of a step."""
