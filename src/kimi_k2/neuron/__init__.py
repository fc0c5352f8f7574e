"""Deployment on AWS Trainium: presets, what fits, and the job that compiles. Nothing here imports NxD when loaded."""
