# The model class, conversion and compilation on AWS's Deep Learning Container of Neuron SDK 2.29. From the root:
#     docker build -f docker/neuron.Dockerfile -t kimi-k2-neuron .
#     docker run --device /dev/neuron0 (to neuron15) -v /models:/models -v /presharded:/presharded kimi-k2-neuron doctor
ARG SDK=2.9.0-neuronx-py312-sdk2.29.1-ubuntu24.04
FROM public.ecr.aws/neuron/pytorch-inference-neuronx:${SDK}
WORKDIR /opt/kimi-k2
COPY . .
# The container's torch, compiler and NxD meet the requirements, so pip leaves them as they are.
RUN pip install --no-cache-dir -r requirements-neuron.txt -c constraints/neuron-2.29.txt
ENTRYPOINT ["kimi-k2"]
