"""``python -m daskdist``."""

from daskdist.cli import main

if __name__ == "__main__":
    main(prog_name="daskdist")
