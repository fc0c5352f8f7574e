"""Formats of routed experts on Neuron: one class each (`format.ExpertFormat`)."""
