"""From an applied module and batches to steps, parity and checkpoints."""
