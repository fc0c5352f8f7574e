"""Generation: sampling, the decode step arranged for CUDA graphs, and the loop that joins them."""
