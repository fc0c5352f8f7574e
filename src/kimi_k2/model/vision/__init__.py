"""The vision tower in plain PyTorch: images of any sizes, packed in one sequence."""
