"""Load on an OpenAI server from outside, in the terms of `vllm bench serve`."""
