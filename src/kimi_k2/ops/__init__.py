"""The operations of the model by name: pure functions on tensors, and the table of their implementations."""
