# vLLM with the plug-in, for Hopper GPUs. From the repository's root:
#     docker build -f docker/cuda.Dockerfile -t kimi-k2 .
#     docker run --gpus all --ipc host -p 8000:8000 -v /models:/models kimi-k2 serve /models/Kimi-K2-Thinking
FROM python:3.12-slim
# The kernels are compiled when they are first used: nvcc comes with the extra `cuda`, its host compiler from here.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ git && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/kimi-k2
COPY . .
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ".[vllm,cuda]"
EXPOSE 8000
ENTRYPOINT ["kimi-k2"]
