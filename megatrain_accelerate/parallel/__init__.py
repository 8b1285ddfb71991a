"""Several processes of one machine, each with a GPU of its own, that train one model together."""
