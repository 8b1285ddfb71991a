"""``python -m megatrain_accelerate``: the console script ``megatrain``."""

from megatrain_accelerate.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
