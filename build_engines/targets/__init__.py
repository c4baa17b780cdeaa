"""What a checkpoint is turned into: one module per target."""
