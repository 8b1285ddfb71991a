"""The yaml files that ``megatrain config`` prints. In the repository they are links to those in ``recipes/``."""
