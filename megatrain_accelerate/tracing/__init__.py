"""`megatrain trace`: what a traced step looks like. Standard library only, but for the picture."""
