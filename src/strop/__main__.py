"""``python -m strop`` is ``strop``, also where the package is only on the path."""

from strop.cli import main

if __name__ == "__main__":
    main()
