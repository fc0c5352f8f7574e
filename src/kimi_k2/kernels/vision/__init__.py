"""What the vision tower needs beside cuBLAS: attention within the images of a packed sequence, and 2D RoPE."""
