"""The operations of the model by name, and the table of their implementations."""
