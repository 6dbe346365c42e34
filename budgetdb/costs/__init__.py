"""Cost models: a step's peak bytes as a formula of its shape, fitted to probes and inverted exactly."""
