"""What serving engines with a cache in pages have in common: our layers over it, and weights by rank."""
