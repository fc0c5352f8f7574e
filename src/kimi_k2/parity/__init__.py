"""Does another backend compute what this one did? Golden activations, replay, and the first module that diverges."""
