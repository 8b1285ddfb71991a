"""What is renamed, replaced and rotated when a checkpoint is saved."""
