"""Tracing: what a step allocates, followed without a device, and the allocator that serves it, simulated."""
