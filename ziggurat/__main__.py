"""Entry point of `python -m ziggurat`."""

from ziggurat.cli import main

if __name__ == "__main__":
    main()
