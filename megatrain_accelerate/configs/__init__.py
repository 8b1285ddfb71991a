"""``megatrain config``: the yaml files of ``recipes/``, which come with the package. Here they are links to those."""
