"""`kimi-k2 bench profile` as a script: TPOT and TTFT on one GPU or, under torchrun, on several."""

from kimi_k2.cli import main

if __name__ == "__main__":
    main("bench", "profile")
