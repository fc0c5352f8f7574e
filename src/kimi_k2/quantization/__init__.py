"""Weight formats: one class a stored quantization (`stored.StoredFormat`), and what Neuron makes of FP8."""
