"""Workloads: what one step of an evaluation runs, and on which inputs."""
