"""Weight formats: FP8 128x128 blocks, INT4 groups, and what Neuron makes of FP8."""
