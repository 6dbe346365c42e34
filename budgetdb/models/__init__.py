"""Models: loaded by name or outlined without memory, told apart by a fingerprint, and described."""
