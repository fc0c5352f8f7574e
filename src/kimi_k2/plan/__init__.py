"""Plans a deployment before the machine is rented: memory a rank, bytes and operations a step, and what would fit."""
