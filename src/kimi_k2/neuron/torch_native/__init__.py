"""Kimi-K2 on vllm-neuron's torch-native line: models are PyTorch modules that torch.compile lowers, without NxDI.

What the line asks of a model is in aws-neuron-sdk, `vllm-neuron/docs/model-dev/onboarding-models.md`. Nothing of this
package has run on Trainium. Its tests play worker and runner as that page describes them.
"""
