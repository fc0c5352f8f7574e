"""`kimi-k2 compile` as a script."""

from kimi_k2.cli import main

if __name__ == "__main__":
    main("compile")
