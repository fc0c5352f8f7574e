"""Linear layers of few tokens, with norm and residual sum before them."""
